"""View parts, backward: values of the templates of all kernels that make gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...base import SmemRegion
from ...mask_view import PairMaskView
from ...plan import template_of
from ...support.view_parts import (
    Alias,
    ScoresView,
    SequenceView,
    Uses,
    included,
    scores_view,
    sequence_view,
    structs_of,
)
from ...view import (
    CPP_ELEMENTS,
    MMA_ELEMENTS,
    KernelView,
    MaskListView,
    TensorView,
    kernel_view,
    mask_list_view,
    tensor_view,
)
from ..shared import chains_of
from .plan import OF_KEPT, OF_QUERIES, BackwardPlan, BiasGradientPlan
from .wide import cta_columns

GATHERED = ("q", "k", "v", "d_o")  # operands whose rows warps may copy
MMA_DEPTH = 16  # of a product's reduction, in 16-bit elements
BOX_COLUMNS = 64  # of a row in 128 bytes


@dataclass(frozen=True)
class Constant:
    """A constant of the source: its C++ name and its value."""

    name: str
    value: int


@dataclass(frozen=True)
class Product:
    """Products of one shape: columns of the accumulator, and lengths of chains in steps."""

    columns: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class BlockMapFunction:
    """A function of the source that finds what a tile sees. tensor: the parameter that has the map;
    function: its C++ name."""

    tensor: str
    function: str


@dataclass(frozen=True, kw_only=True)
class MainView:
    """Values of templates of all kernels that make a gradient. Strings are C++.

    headers: the lines that include them. structs: those of the fragments in use. element: the
    struct of operands' elements; mma_element: their type in PTX. head_dim_qk, head_dim_v: columns
    of a CTA.
    tile_m, tile_n: queries and keys a tile, or a block. consumers: warpgroups beside the producer.
    smem: places in shared memory. kv_alias: the fragment that fetches keys. revisits: whether what
    is in memory of a tile's context is read anew at blocks. gather: whether warps copy rows that
    the copy engine cannot read; gathered: the operands then, else none. row_block: queries a block
    of the workspaces. pair_mask: where it finds an arbitrary mask, if there is one.
    block_maps: those of the blocks that bits made before show, none where the call's kernels make
    them. dropout: whether weights are dropped.
    depth: elements of a step of a product's reduction; box_columns: of a row that a box has.
    """

    kernel: KernelView
    threads: int
    headers: str
    structs: str
    element: str
    mma_element: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    consumers: int
    producer_registers: int
    consumer_registers: int
    smem: tuple[Constant, ...]
    masks: MaskListView
    scores: ScoresView
    queries: SequenceView
    keys: SequenceView
    kv_alias: Alias
    revisits: bool
    gather: bool
    gathered: tuple[TensorView, ...]
    row_block: int
    pair_mask: PairMaskView | None
    block_maps: tuple[BlockMapFunction, ...]
    dropout: bool
    score_product: Product
    depth: int = MMA_DEPTH
    box_columns: int = BOX_COLUMNS


def main_fields(
    problem: Problem,
    plan: BackwardPlan | BiasGradientPlan,
    kernel: KernelEntry,
    uses: Uses,
    root: Path,
) -> dict[str, Any]:
    """The fields of `MainView` but those in which kernels differ: headers, the parameter that has a
    mask's bits, and products of scores. uses: fragments of the backward."""
    masks = uses["mask"]
    pairs = isinstance(plan, BackwardPlan) and plan.pairs
    dims = problem.head_dim_qk, problem.head_dim_v
    columns, columns_v = cta_columns(problem) if pairs else dims
    return {
        "kernel": kernel_view(kernel, template_of(plan)),
        "threads": plan.threads,
        "structs": structs_of(uses, root),
        "element": CPP_ELEMENTS[problem.dtype_q],
        "mma_element": MMA_ELEMENTS.get(problem.dtype_q, ""),
        "head_dim_qk": columns,
        "head_dim_v": columns_v,
        "tile_m": plan.tile.m,
        "tile_n": plan.tile.n,
        "consumers": plan.consumers,
        "producer_registers": plan.producer_registers,
        "consumer_registers": plan.consumer_registers,
        "smem": smem_constants(plan.smem),
        "masks": mask_list_view(masks),
        "scores": scores_view(uses["score"], masks),
        "queries": sequence_view(uses["q_seq"][0]),
        "keys": sequence_view(uses["kv_seq"][0]),
        "kv_alias": Alias("KvFetch", uses["kv_fetch"][0].fragment.struct),
        "revisits": problem.varlen or problem.positions,
        "gather": problem.gather,
        "gathered": tuple(tensor_view(problem, name) for name in GATHERED * problem.gather),
        "row_block": plan.row_block,
        "block_maps": tuple(map(_map_function, block_maps(problem, plan))),
        "dropout": problem.dropout,
    }


def block_maps(problem: Problem, plan: BackwardPlan | BiasGradientPlan) -> tuple[str, ...]:
    """The maps of blocks that a kernel reads: of its own tiles, and where these have turns at
    blocks of queries what these see."""
    if not (problem.listed and isinstance(plan, BackwardPlan)):
        return ()
    if plan.family in (OF_QUERIES, OF_KEPT):
        return ("mask_row_map",)
    ordered = plan.fused and plan.deterministic
    return ("mask_column_map", *(("mask_row_map",) if ordered else ()))


def _map_function(tensor: str) -> BlockMapFunction:
    return BlockMapFunction(tensor, "seen_keys" if tensor == "mask_row_map" else "seen_queries")


def smem_constants(regions: tuple[SmemRegion, ...]) -> tuple[Constant, ...]:
    """The places in shared memory, and how large that of a job is."""
    found = []
    for region in regions:
        found.append(Constant(f"kSmem{region.name}", region.offset))
        if region.name == "Job":
            found.append(Constant("kJobBytes", region.bytes))
    return tuple(found)


def steps_of(extent: int) -> int:
    """The steps of a reduction along so many elements."""
    return -(-extent // MMA_DEPTH)


def whole_score_product(problem: Problem, columns: int) -> Product:
    """S and dP over all columns of heads, however wide."""
    qk, v = (chains_of(steps_of(dim)) for dim in (problem.head_dim_qk, problem.head_dim_v))
    return Product(columns, (*qk, *v))


def score_product(problem: Problem, columns: int, held_steps: int = 0, held_v: int = 0) -> Product:
    """S and dP, or their transposes, over a CTA's columns. held_steps, held_v: those of S, and
    of dP, that another product makes."""
    qk, v = map(steps_of, cta_columns(problem))
    return Product(columns, (qk - held_steps, v - held_v))


def main_headers(
    problem: Problem,
    *,
    keys_as_rows: bool = False,
    makes_d: bool = False,
    pairs: bool = False,
    stores: bool = False,
) -> str:
    """The lines that include a main kernel's headers. keys_as_rows: whether scores are transposed.
    makes_d: whether consumers make D of some blocks. pairs: whether two CTAs share tiles."""
    bias = problem.bias
    packed = "packed" in (problem.q_seq, problem.kv_seq)
    return included(
        ("context.cuh", True),
        ("copy/gathered_rows.cuh", problem.gather),
        ("dropout.cuh", problem.dropout),
        ("dropout_places.cuh", problem.dropout and problem.positions),
        ("mask_bits.cuh", problem.attn_mask),
        ("asked_mask.cuh", problem.asks_mask),
        ("mma/fragment.cuh", True),
        ("mma/gemm.cuh", True),
        ("mma/score_tile.cuh", bias),
        ("mma/stage.cuh", True),
        ("mma/store.cuh", stores or (problem.gather and not problem.wide_gradients)),
        ("mma/store_float.cuh", problem.wide_gradients),
        ("ptx/barrier.cuh", True),
        ("ptx/cluster.cuh", pairs),
        ("ptx/global.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/matrix_move.cuh", True),
        ("ptx/tma.cuh", True),
        ("scheduler/block_map.cuh", problem.listed),
        ("scheduler/gap_rows.cuh", problem.varlen),
        ("scheduler/kv_blocks.cuh", True),
        ("scheduler/q_blocks.cuh", True),
        ("scheduler/packed_tiles.cuh", packed),
        ("scheduler/sequence_order.cuh", problem.varlen),
        ("scheduler/tile_order.cuh", True),
        ("softmax/exactly.cuh", bias),
        ("softmax/row.cuh", bias),
        ("special.cuh", bool(problem.scores)),
        ("softmax/transposed.cuh", keys_as_rows),
        ("softmax/row.cuh", makes_d and not bias),
    )
