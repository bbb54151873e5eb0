"""View: what templates of kernels read whose warps have rows of queries: gradients of scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...mask_view import PairMaskView, pair_mask_view
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
from ...view import CPP_ELEMENTS, KernelView, MaskListView, kernel_view, mask_list_view
from .choices import ROW_TILE
from .plan import ROW_BLOCK, BiasPlan
from .view import Constant, Operand, constants_of, operand_of


@dataclass(frozen=True, kw_only=True)
class RowsView:
    """Values that templates name of kernels whose warps have rows of queries. Strings are C++.

    kernel, headers, structs, threads, smem, row_block, head_dim_qk, head_dim_v, element, masks,
    scores, queries, keys, kv_alias, dropout, operands: as `MmaBackwardView` has them. warps: of a
    CTA, 16 queries each; tile_n: keys a tile. pair_mask: where it finds an arbitrary mask,
    if there is one. factor: what gradients of scores are multiplied by.
    """

    kernel: KernelView
    headers: str
    structs: str
    threads: int
    smem: tuple[Constant, ...]
    warps: int
    tile_n: int
    row_block: int
    head_dim_qk: int
    head_dim_v: int
    element: str
    masks: MaskListView
    scores: ScoresView
    queries: SequenceView
    keys: SequenceView
    kv_alias: Alias
    pair_mask: PairMaskView | None
    dropout: bool
    operands: tuple[Operand, ...]
    factor: str


def rows_fields(
    problem: Problem, plan: BiasPlan, uses: Uses, kernel: KernelEntry, root: Path
) -> dict[str, Any]:
    """Fields of a `RowsView` but its headers and factor.

    uses: the problem's fragments by role. kernel: the launch description. root: the templates'
    directory.
    """
    return {
        "kernel": kernel_view(kernel, template_of(plan)),
        "structs": structs_of(uses, root),
        "threads": plan.threads,
        "smem": constants_of(plan.smem),
        "warps": plan.tile.m // ROW_TILE,
        "tile_n": plan.tile.n,
        "row_block": ROW_BLOCK,
        "head_dim_qk": problem.head_dim_qk,
        "head_dim_v": problem.head_dim_v,
        "element": CPP_ELEMENTS[problem.dtype_q],
        "masks": mask_list_view(uses["mask"]),
        "scores": scores_view(uses["score"], uses["mask"]),
        "queries": sequence_view(uses["q_seq"][0]),
        "keys": sequence_view(uses["kv_seq"][0]),
        "kv_alias": Alias("KvIteration", uses["kv_iter"][0].fragment.struct),
        "pair_mask": pair_mask_view(problem, uses),
        "dropout": problem.dropout,
        "operands": tuple(operand_of(problem, name) for name in ("q", "k", "v", "d_o")),
    }


def headers_of(problem: Problem) -> str:
    """The lines that include the headers that all of these kernels have."""
    return included(
        ("context.cuh", True),
        ("copy/cta_gathered.cuh", problem.gather),
        ("copy/cta_rows.cuh", not problem.gather),
        ("dropout_draw.cuh", problem.dropout),
        ("mask_bits.cuh", problem.attn_mask),
        ("asked_mask.cuh", problem.asks_mask),
        ("mma/fragment.cuh", True),
        ("mma/score_tile.cuh", problem.bias),
        ("mma/store.cuh", True),
        ("mma/warp_products.cuh", True),
        ("ptx/async_copy.cuh", True),
        ("ptx/barrier.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/matrix_move.cuh", True),
        ("ptx/tma.cuh", True),
        ("scheduler/kv_blocks.cuh", True),
        ("scheduler/packed_tiles.cuh", problem.q_seq == "packed"),
        ("softmax/exactly.cuh", problem.bias),
        ("softmax/row.cuh", True),
        ("special.cuh", True),
    )
