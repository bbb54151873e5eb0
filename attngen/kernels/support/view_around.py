"""Views, backward: the kernels before and after those that make gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...runtime.program import KernelEntry
from ...spec.attention_spec import MAX_HEAD_DIM
from ...spec.problem import Problem
from ...targets.target import TARGETS
from ..fill import emit_fragment
from ..plan import template_of
from ..uses import FragmentUse
from ..view import (
    CPP_ELEMENTS,
    FragmentView,
    KernelView,
    MaskListView,
    captured_view,
    kernel_view,
    mask_list_view,
)
from .around import CLEARED, AroundPlan, ClearPlan, ConvertPlan, PreparePlan, RowSumsPlan
from .view_parts import (
    ZEROED_TURNS,
    Alias,
    ScoresView,
    SequenceView,
    Uses,
    included,
    q_len_of,
    scores_view,
    sequence_view,
    structs_of,
    tensor_row_of,
)

# A thread's four sums lie together, or each among the same of all threads.
LOADS = ("acc[i / 4 * kThreads + threadIdx.x]", "gather_planes<kThreads>(acc, i)")
# Up to this head dim a thread has a quarter of an SM's registers where lengths vary.
FEW_REGISTERS_HEAD_DIM = 192


@dataclass(frozen=True, kw_only=True)
class BlockView:
    """Values of templates of kernels whose CTAs have a block of queries each, or a part.

    Strings are C++ in this module's views. headers: the lines that include them. structs: those of
    the fragments in use. element: the struct of operands'
    elements. row_block: queries a block. varlen: whether lengths vary. gather: whether rows are
    read, or written, an element at a time. parts: CTAs that share a block, None where a CTA has all
    of it. zeroed_turns: the statement that zeroes the block's count of tiles that have added to
    dQ, empty where none does.
    """

    kernel: KernelView
    threads: int
    headers: str
    structs: str
    element: str
    row_block: int
    varlen: bool
    gather: bool
    queries: SequenceView
    parts: str | None
    zeroed_turns: str
    head_dim_qk: int


@dataclass(frozen=True, kw_only=True)
class PrepareView(BlockView):
    """Values of prepare.cu.j2: D and LSE before the main kernels.

    lets_start: whether the next kernel may start before this one has ended.
    q_len: queries of the sequence; tensor_row: the tensor's row of position `row`. keys, masks:
    None where no dQ is zeroed. zeros: whether dQ of blocks that no tile visits is zeroed.
    cleared_floats: of dQ's sums of a block that are zeroed, 0 where none are.
    marks_large: whether an LSE that shows no sum becomes -inf. made_tile: keys of a tile whose
    consumers make D of its first blocks, 0 of none. cta_blocks: blocks of queries a CTA.
    ctas_an_sm: CTAs for which registers are kept, None for as many as the compiler likes.
    """

    head_dim_v: int
    q_len: str
    tensor_row: str
    keys: SequenceView | None
    masks: MaskListView | None
    zeros: bool
    cleared_floats: int
    lets_start: bool
    marks_large: bool
    dropout: bool
    made_tile: int
    cta_blocks: int
    ctas_an_sm: int | None


@dataclass(frozen=True, kw_only=True)
class ConvertView(BlockView):
    """Values of convert.cu.j2: dQ, and maybe dK and dV, from their float32 sums.

    q_len: queries of the sequence; tensor_row: the tensor's row of position `row`. block_parts:
    warpgroups that left a part each of a block's dQ, of `dq_columns` columns. splits_rows: whether
    parts are rows of dQ, else columns. load: C++, the four sums of a thread from element i on.
    counts: whether blocks to which no tile has added have no sums, as their count of turns says.
    sums_keys: whether dK and dV have sums in memory, too, of
    `key_rows` keys a tile. wide: whether dQ is float32.
    stores_chunks: whether rows of 16 bits leave in chunks of 16 bytes. learned: the score that
    multiplies others by what it learns, whose gradients are made here, or None; sums: C++, the type
    of what adds these.
    """

    head_dim_v: int
    q_len: str
    tensor_row: str
    keys: SequenceView
    block_parts: int
    splits_rows: bool
    load: str
    counts: bool
    dq_columns: int
    sums_keys: bool
    dk_columns: int
    dv_columns: int
    key_rows: int
    dropout: bool
    wide: bool
    stores_chunks: bool
    learned: FragmentView | None
    sums: str


@dataclass(frozen=True, kw_only=True)
class RowSumsView(BlockView):
    """Values of row_sums.cu.j2: sums of rows whose LSE shows none.

    lets_start: whether the next kernel may start before this one has ended. kv_alias: the fragment
    that says which blocks of keys rows see. attn_mask: whether a mask's bits
    hide keys. keeps_queries: whether threads have registers for their rows of queries.
    """

    keys: SequenceView
    masks: MaskListView
    scores: ScoresView
    kv_alias: Alias
    attn_mask: bool
    lets_start: bool
    keeps_queries: bool


def prepare_view(
    problem: Problem, plan: PreparePlan, kernel: KernelEntry, uses: Uses, root: Path
) -> PrepareView:
    """Decide what prepare.cu.j2 renders. uses: fragments of the queries' sequence, and where dQ is
    zeroed of masks and of the keys' sequence. root: the templates' directory."""
    few_registers = problem.varlen and problem.head_dim_v <= FEW_REGISTERS_HEAD_DIM
    return PrepareView(
        kernel=kernel_view(kernel, template_of(plan)),
        threads=plan.threads,
        headers=_prepare_headers(problem, plan),
        structs=structs_of(uses, root) if problem.varlen or plan.zeros else "",
        element=CPP_ELEMENTS[problem.dtype_q],
        row_block=plan.row_block,
        varlen=problem.varlen,
        gather=problem.gather,
        queries=sequence_view(uses["q_seq"][0]),
        parts=None,
        zeroed_turns=ZEROED_TURNS * plan.turns,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        q_len=q_len_of(problem),
        tensor_row=tensor_row_of(problem),
        keys=sequence_view(uses["kv_seq"][0]) if plan.zeros else None,
        masks=mask_list_view(uses["mask"]) if plan.zeros else None,
        zeros=plan.zeros,
        cleared_floats=plan.dq_floats if isinstance(plan, ClearPlan) else 0,
        lets_start=lets_start(plan),
        marks_large=problem.bias,
        dropout=problem.dropout,
        made_tile=plan.made_tile,
        cta_blocks=plan.cta_blocks,
        ctas_an_sm=4 if few_registers else None,
    )


def convert_view(
    problem: Problem,
    plan: ConvertPlan,
    kernel: KernelEntry,
    uses: Uses,
    keys: SequenceView,
    learned: Sequence[FragmentUse],
    root: Path,
) -> ConvertView:
    """Decide what convert.cu.j2 renders. uses: fragments of the sequences that it reads. learned:
    the score that learns at queries, if any does. root: the templates' directory."""
    structs = [structs_of(uses, root)] if problem.varlen else []
    structs += [emit_fragment(root, use.fragment) for use in learned]
    return ConvertView(
        kernel=kernel_view(kernel, template_of(plan)),
        threads=plan.threads,
        headers=_convert_headers(problem, plan),
        structs="\n\n".join(structs),
        element=CPP_ELEMENTS[problem.dtype_q],
        row_block=plan.row_block,
        varlen=problem.varlen,
        gather=problem.gather,
        queries=sequence_view(uses["q_seq"][0]),
        parts="kParts",
        zeroed_turns="",
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        q_len=q_len_of(problem),
        tensor_row=tensor_row_of(problem),
        keys=keys,
        block_parts=plan.parts,
        splits_rows=plan.dq_split == "rows",
        load=LOADS[plan.dq_split == "planes"],
        counts=plan.dq_split not in CLEARED,
        dq_columns=plan.dq_columns,
        sums_keys=plan.dk_columns > 0,
        dk_columns=plan.dk_columns,
        dv_columns=plan.dv_columns,
        key_rows=plan.key_rows,
        dropout=problem.dropout,
        wide=problem.wide_gradients,
        stores_chunks=not (problem.gather or problem.wide_gradients),
        learned=next(map(captured_view, learned), None),
        sums=f"LineSums<{str(problem.deterministic).lower()}>",
    )


def row_sums_view(
    problem: Problem, plan: RowSumsPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> RowSumsView:
    """Decide what row_sums.cu.j2 renders. uses: fragments of the backward, and of the walk over
    blocks of keys. root: the templates' directory."""
    masks = uses["mask"]
    return RowSumsView(
        kernel=kernel_view(kernel, template_of(plan)),
        threads=plan.threads,
        headers=_row_sums_headers(problem),
        structs=structs_of(uses, root),
        element=CPP_ELEMENTS[problem.dtype_q],
        row_block=plan.row_block,
        varlen=problem.varlen,
        gather=problem.gather,
        queries=sequence_view(uses["q_seq"][0]),
        parts=None,
        zeroed_turns="",
        head_dim_qk=problem.head_dim_qk,
        keys=sequence_view(uses["kv_seq"][0]),
        masks=mask_list_view(masks),
        scores=scores_view(uses["score"], masks, weighed=False),
        kv_alias=Alias("KvIteration", uses["kv_iter"][0].fragment.struct),
        attn_mask=problem.attn_mask,
        lets_start=lets_start(plan),
        keeps_queries=problem.head_dim_qk <= MAX_HEAD_DIM,
    )


def lets_start(plan: AroundPlan) -> bool:
    """Whether its architecture has kernels that start before the one before has ended."""
    return "griddepcontrol" in TARGETS[plan.arch].instructions


def _prepare_headers(problem: Problem, plan: PreparePlan) -> str:
    made = plan.made_tile > 0
    return included(
        ("context.cuh", problem.varlen or plan.zeros),
        ("platform.cuh", True),
        ("ptx/global.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/tma.cuh", True),
        ("softmax/row.cuh", True),
        ("scheduler/q_blocks.cuh", made),
        ("scheduler/kv_blocks.cuh", plan.zeros and not made),
        ("scheduler/grid_place.cuh", True),
        ("scheduler/packed_tiles.cuh", problem.q_seq == "packed"),
    )


def _convert_headers(problem: Problem, plan: ConvertPlan) -> str:
    return included(
        ("context.cuh", problem.varlen or plan.learns),
        ("learned_sums.cuh", plan.learns),
        ("mma/fragment.cuh", True),
        ("mma/store_float.cuh", problem.wide_gradients),
        ("mma/sums.cuh", plan.dq_split == "planes"),
        ("ptx/math.cuh", True),
        ("ptx/tma.cuh", True),
        ("scheduler/grid_place.cuh", True),
        ("scheduler/packed_tiles.cuh", "packed" in (problem.q_seq, problem.kv_seq)),
    )


def _row_sums_headers(problem: Problem) -> str:
    return included(
        ("context.cuh", True),
        ("mask_bits.cuh", problem.attn_mask),
        ("mma/fragment.cuh", True),
        ("mma/score_tile.cuh", True),
        ("ptx/global.cuh", True),
        ("ptx/math.cuh", True),
        ("ptx/tma.cuh", True),
        ("scheduler/grid_place.cuh", True),
        ("scheduler/kv_blocks.cuh", True),
        ("scheduler/packed_tiles.cuh", problem.q_seq == "packed"),
        ("softmax/exactly.cuh", True),
        ("softmax/row.cuh", True),
        ("special.cuh", True),
    )
