"""View: what the templates of a backward by products of warps read, each decision made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...base import SmemRegion
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
from ...view import (
    CPP_ELEMENTS,
    KernelView,
    MaskListView,
    TensorView,
    kernel_view,
    mask_list_view,
    tensor_view,
)
from .choices import ROW_TILE, dq_columns, steps_of
from .plan import ROW_BLOCK, Plan


@dataclass(frozen=True)
class Operand:
    """A tensor whose rows are copied. Strings are C++.

    finder: the function that finds rows of a head; token: the first row of a sequence; before_rows,
    behind_rows: arguments on either side of their number.
    """

    name: str
    finder: str
    token: str
    before_rows: str = ""
    behind_rows: str = ""


@dataclass(frozen=True)
class Gradient:
    """A gradient of keys or values, of which a warp has some columns. Strings are C++.

    share: which columns; factor: what sums are multiplied by; store: the function that stores them;
    left: the columns of the tensor, empty where each warp has all of its own.
    """

    tensor: TensorView
    share: str
    factor: str
    store: str
    left: str


@dataclass(frozen=True)
class Gap:
    """Gradients whose rows of no sequence are filled: of which sequence, how many heads, both C++,
    and whether there may be none."""

    sequence: str
    heads: str
    optional: bool
    tensors: tuple[TensorView, ...]


@dataclass(frozen=True)
class Constant:
    """A constant of the source: its C++ name and its value."""

    name: str
    value: int


@dataclass(frozen=True)
class MmaBackwardView:
    """All that the templates of a backward by products of warps name. Strings are C++.

    The kernel: kernel: its symbol, template and parameters. headers: the lines that include them.
    structs: those of the fragments in use. threads, ctas: of a CTA, and of an SM. smem: places in
    shared memory.

    The plan: key_warps, query_warps, parts, keeps_weights, dq_row_warps, late_dq: as the plan says.
    block, tile_n: queries a block, and keys a tile. row_block, dq_floats: queries of a block of the
    workspaces, and its sums. one_stage: whether the next block is copied once nobody reads the one
    at hand. deterministic: whether tiles add to dQ in an order. add_sums: the function that adds to
    dQ's sums; sum_stride: floats from a thread's first sum to the next one's.

    Formats: head_dim_qk, head_dim_v: columns. element: the struct of operands' elements.

    Fragments: masks, scores, queries, keys: as the templates around a backward take them. kv_alias:
    the fragment that says which blocks of keys rows see. pair_mask: where it finds an
    arbitrary mask, if there is one; listed: whether the mask was made before, with its
    blocks. dropout: whether weights are dropped. varlen: whether
    lengths are told on the device.

    Where data lies: operands: what is copied. gradients: of keys and values. gaps: gradients of
    which rows of no sequence are filled.
    """

    kernel: KernelView
    headers: str
    structs: str
    threads: int
    ctas: int
    smem: tuple[Constant, ...]
    key_warps: int
    query_warps: int
    parts: int
    keeps_weights: bool
    dq_row_warps: int
    block: int
    tile_n: int
    row_block: int
    dq_floats: int
    one_stage: bool
    late_dq: bool
    deterministic: bool
    add_sums: str
    sum_stride: int
    head_dim_qk: int
    head_dim_v: int
    element: str
    masks: MaskListView
    scores: ScoresView
    queries: SequenceView
    keys: SequenceView
    kv_alias: Alias
    pair_mask: PairMaskView | None
    listed: bool
    dropout: bool
    varlen: bool
    operands: tuple[Operand, ...]
    gradients: tuple[Gradient, ...]
    gaps: tuple[Gap, ...]


def backward_view(
    problem: Problem, plan: Plan, uses: Uses, kernel: KernelEntry, root: Path
) -> MmaBackwardView:
    """The view of the kernel that computes the backward `problem` as `plan` says.

    uses: its fragments by role. kernel: its launch description. root: the templates' directory.
    """
    queries, keys = sequence_view(uses["q_seq"][0]), sequence_view(uses["kv_seq"][0])
    return MmaBackwardView(
        kernel=kernel_view(kernel, template_of(plan)),
        headers=headers_of(problem),
        structs=structs_of(uses, root),
        threads=plan.threads,
        ctas=plan.ctas,
        smem=constants_of(plan.smem),
        key_warps=plan.key_warps,
        query_warps=plan.query_warps,
        parts=plan.parts,
        keeps_weights=plan.keeps_weights,
        dq_row_warps=plan.dq_row_warps,
        block=plan.tile.m,
        tile_n=plan.tile.n,
        row_block=ROW_BLOCK,
        dq_floats=ROW_BLOCK * dq_columns(problem),
        one_stage=plan.stages == 1,
        late_dq=plan.late_dq,
        deterministic=plan.deterministic,
        add_sums="add_quads" if plan.adds_quads else "add_planes",
        sum_stride=4 if plan.adds_quads else 1,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        element=CPP_ELEMENTS[problem.dtype_q],
        masks=mask_list_view(uses["mask"]),
        scores=scores_view(uses["score"], uses["mask"]),
        queries=queries,
        keys=keys,
        kv_alias=Alias("KvIteration", uses["kv_iter"][0].fragment.struct),
        pair_mask=pair_mask_view(problem, uses, of_keys=True, map="seen_queries"),
        listed=problem.listed,
        dropout=problem.dropout,
        varlen=problem.varlen,
        operands=tuple(operand_of(problem, name) for name in ("q", "k", "v", "d_o")),
        gradients=(
            gradient_of(problem, plan, "dk", "qk_share"),
            gradient_of(problem, plan, "dv", "v_share"),
        ),
        gaps=gaps_of(problem),
    )


def constants_of(regions: tuple[SmemRegion, ...]) -> tuple[Constant, ...]:
    """The places in shared memory."""
    return tuple(Constant(f"kSmem{region.name}", region.offset) for region in regions)


def operand_of(problem: Problem, name: str) -> Operand:
    """A tensor whose rows are copied."""
    side, kind = ("q", problem.q_seq) if name in ("q", "d_o") else ("kv", problem.kv_seq)
    token = "0" if kind == "dense" else f"{side}_sequence(p).first_token(batch)"
    if not problem.gather:
        return Operand(name, "head_rows", token)
    columns = "dim_v" if name in ("v", "d_o") else "dim_qk"
    return Operand(name, "gathered_rows", token, f"p.{name}_stride_column, ", f", p.{columns}")


def gradient_of(problem: Problem, plan: Plan, name: str, share: str) -> Gradient:
    """A gradient of keys (`dk`) or values (`dv`), of which warps have some columns."""
    tensor = tensor_view(problem, name)
    columns = -(-steps_of(tensor.columns) // plan.query_warps) * ROW_TILE
    whole = columns * plan.query_warps == tensor.columns
    factors = [*(("p.scale",) if name == "dk" else ()), *("p.keep_scale",) * problem.dropout]
    factor = " * ".join(factors) or "1.f"
    left = f"p.{tensor.columns_parameter}" if tensor.gathered else str(tensor.columns)
    if tensor.is_float:
        return Gradient(tensor, share, factor, f"store_float_rows<{columns}>", left)
    if tensor.gathered or not whole:
        return Gradient(tensor, share, factor, f"store_rows<Element, {columns}>", left)
    return Gradient(tensor, share, factor, f"store_whole_rows<Element, {columns}>", "")


def gaps_of(problem: Problem) -> tuple[Gap, ...]:
    """The gradients of which the kernel fills rows of no sequence: its own, and dQ, which another
    one converts."""
    dq, dk, dv = (tensor_view(problem, name) for name in ("dq", "dk", "dv"))
    of_queries = Gap("q_sequence(p)", "p.heads_q", True, (dq,))
    of_keys = Gap("kv_sequence(p)", "p.heads_kv", False, (dk, dv))
    kinds = {of_queries: problem.q_seq, of_keys: problem.kv_seq}
    return tuple(gap for gap, kind in kinds.items() if kind != "dense")


def headers_of(problem: Problem) -> str:
    """The lines that include the kernel's headers."""
    return included(
        ("context.cuh", True),
        ("copy/cta_gathered.cuh", problem.gather),
        ("copy/cta_rows.cuh", not problem.gather),
        ("dropout_draw.cuh", problem.dropout),
        ("mask_bits.cuh", problem.attn_mask),
        ("asked_mask.cuh", problem.asks_mask),
        ("mma/atoms.cuh", True),
        ("mma/fragment.cuh", True),
        ("mma/score_tile.cuh", problem.bias),
        ("mma/store.cuh", not problem.wide_gradients),
        ("mma/store_float.cuh", problem.wide_gradients),
        ("mma/sums.cuh", True),
        ("mma/warp_products.cuh", True),
        ("ptx/async_copy.cuh", True),
        ("ptx/barrier.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/matrix_move.cuh", True),
        ("ptx/take_turn.cuh", problem.deterministic),
        ("ptx/tma.cuh", True),
        ("scheduler/block_map.cuh", problem.listed),
        ("scheduler/gap_rows.cuh", problem.varlen),
        ("scheduler/kv_blocks.cuh", True),
        ("scheduler/packed_tiles.cuh", "packed" in (problem.q_seq, problem.kv_seq)),
        ("scheduler/q_blocks.cuh", True),
        ("scheduler/tile_order.cuh", True),
        ("softmax/exactly.cuh", problem.bias),
        ("softmax/row.cuh", problem.bias),
        ("softmax/transposed.cuh", True),
        ("special.cuh", bool(problem.scores)),
    )
