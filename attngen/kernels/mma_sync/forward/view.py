"""View: what the templates of a forward by products of warps read, each decision made."""

from __future__ import annotations

from dataclasses import dataclass

from ....runtime.program import KernelEntry
from ....spec.problem import DTYPE_BYTES, Problem
from ...base import SmemRegion
from ...mask_view import PairMaskView, pair_mask_view
from ...plan import template_of
from ...support.view_parts import Alias
from ...uses import FragmentUse
from ...view import (
    CPP_ELEMENTS,
    FragmentView,
    KernelView,
    MaskListView,
    ScoreListView,
    TensorView,
    fragment_view,
    kernel_view,
    mask_list_view,
    score_list_view,
    tensor_view,
)
from ..operands import FIRST_TOKEN, Operand, operand_of
from .plan import Plan
from .view_scales import ScalePlaces, scale_places_of


@dataclass(frozen=True)
class Weights:
    """How scores become weights. Strings are C++.

    scale_log2: of products, in log2 units; unit: of scores as they come to the softmax; shift: log2
    of what weights are multiplied by; slack: log2 of how far maxima may be outgrown; small: whether
    the first score has a cheaper form for small ones; row_maximum: a row's maximum as a score;
    pack: what rounds weights; keep_factor: what the output is multiplied by for what dropout
    leaves. rows: the struct of rows, and no_key: those that have seen none.
    """

    scale_log2: str
    unit: str
    shift: str
    slack: str
    small: bool
    row_maximum: str
    largest_score: str
    pack: str
    element: str
    keep_factor: str
    rows: str
    no_key: str


@dataclass(frozen=True)
class JoinedColumns:
    """Columns of an output that join those that are there. Strings are C++.

    columns: how many; first_column: the first, empty where it is 0. joined: that are read at once,
    in_parts: fewer than all. first_token: that of a sequence, empty where all have one length.
    """

    columns: str = "kHeadDimV"
    first_column: str = ""
    joined: str = "kHeadDimV"
    in_parts: bool = False
    first_token: str = ""


@dataclass(frozen=True)
class Divided:
    """How warps of the same rows divide columns of the output. Strings are C++.

    parts: how many warps do; own_columns: of each. store: the function that stores rows; left: the
    columns that all have.
    """

    parts: int
    own_columns: int
    store: str
    left: str


@dataclass(frozen=True)
class Walk:
    """How a tile goes through its blocks of keys, from the last one on. Strings are C++.

    first: the last block. step: what comes behind each; following: the next one of `block`, and
    more: whether there is one.
    """

    first: str
    step: str
    following: str
    more: str


PLAIN_WALK = Walk("end - 1", "--block", "block - 1", "block > blocks.begin")
LISTED_WALK = Walk("first_block", "block = next", "next", "next >= blocks.begin")


@dataclass(frozen=True)
class MmaForwardView:
    """All that the templates of a forward by products of warps name.

    The kernel: kernel: its symbol, template and parameters. headers: what it includes, in order.
    threads, ctas: of a CTA, and of an SM. smem: regions of shared memory.

    The plan: warps, row_tiles, tile_keys: as the plan says; one_stage: whether keys and values are
    copied in turn. tells_full_blocks: C++, whether blocks in which no key is hidden have code of
    their own; beside rows that begin anywhere, whose copies are long, it would take seconds to
    compile. lazy_rescale_log2: how far maxima may grow before the output is rescaled.
    longest_first: C++, whether tiles begin at the last queries. divided: how warps of the same rows
    divide columns of the output, or None; columns: C++, how many of these a warp has.

    Formats: head_dim_qk, head_dim_v: columns. elements: C++ types by the names that templates have
    for them: of weights, and where these differ of queries, of keys and of the output. eight_bit:
    whether operands have 8 bits; widens: whether keys and values alone have; narrow: whether these
    have, with scales, so that a thread has four neighbouring columns of the output; stores_bytes:
    whether that has 8 bits. step_columns, box_columns: of a step of a product, and of a box of
    keys. q_copied, kv_copied: C++, what makes pairs of bytes, which copies count, of columns.
    keys_by: C++, the types of the product of keys; tile_element: that of what
    scores read in tiles.

    Fragments: fragment_sources: C++, their structs. masks, score_list: as the common macros take
    them; score_list is None without scores. weights: what becomes of scores. softmax, q_seq,
    kv_seq: fragments; kv_iteration: C++, a struct. pair_mask: where it finds an arbitrary mask;
    listed: which was made before, with its blocks; walk: how tiles go through these. by_token:
    whether each token has a scale; scale_places: and where. by_row_tile: whether scores read what
    is of their row tile alone.
    stops_at_bits: whether a window may begin behind the last block of which it has bits. dropout,
    max_logit: as the problem says.

    Where data lies: operands: what is copied. score_tile: the parameter of the tensor that scores
    read in tiles, or None. output: the output's rows. varlen: whether lengths are told on the
    device; joins: whether the output and the LSE join those that are there, joined_columns: which
    of its columns; gather: whether rows begin anywhere; packed: whether queries lie behind each
    other; fills_gaps: whether rows of no sequence are filled. lse_row: C++, where a head's LSE
    begins.
    """

    kernel: KernelView
    headers: tuple[str, ...]
    threads: int
    ctas: int
    smem: tuple[SmemRegion, ...]
    warps: int
    row_tiles: int
    tile_keys: int
    tells_full_blocks: str
    one_stage: bool
    lazy_rescale_log2: int
    longest_first: str
    divided: Divided | None
    columns: str
    head_dim_qk: int
    head_dim_v: int
    elements: tuple[Alias, ...]
    eight_bit: bool
    widens: bool
    narrow: bool
    stores_bytes: bool
    step_columns: int
    box_columns: int
    q_copied: str
    kv_copied: str
    keys_by: str
    tile_element: str
    fragment_sources: tuple[str, ...]
    masks: MaskListView
    score_list: ScoreListView | None
    weights: Weights
    softmax: FragmentView
    q_seq: FragmentView
    kv_seq: FragmentView
    kv_iteration: str
    by_token: bool
    by_row_tile: bool
    scale_places: ScalePlaces
    pair_mask: PairMaskView | None
    listed: bool
    walk: Walk
    stops_at_bits: bool
    dropout: bool
    max_logit: bool
    operands: tuple[Operand, ...]
    score_tile: str | None
    output: TensorView
    varlen: bool
    joins: bool
    joined_columns: JoinedColumns
    gather: bool
    packed: bool
    fills_gaps: bool
    lse_row: str


def forward_view(
    problem: Problem,
    plan: Plan,
    uses: dict[str, list[FragmentUse]],
    kernel: KernelEntry,
    fragment_sources: tuple[str, ...],
) -> MmaForwardView:
    """The view of the kernel that computes the forward `problem` as `plan` says.

    uses: its fragments by role. kernel: its launch description. fragment_sources: the fragments'
    structs.
    """
    masks = mask_list_view(uses["mask"])
    scaled = any(use.fragment.scaled for use in uses["score"])
    tile = next((use.tile for use in uses["score"] if use.tile), None)
    return MmaForwardView(
        kernel=kernel_view(kernel, template_of(plan)),
        headers=headers_of(problem),
        threads=plan.threads,
        ctas=plan.ctas,
        smem=plan.smem,
        warps=plan.warps,
        row_tiles=plan.row_tiles,
        tile_keys=plan.tile.n,
        tells_full_blocks="false" if problem.gather else "true",
        one_stage=plan.stages == 1,
        lazy_rescale_log2=plan.lazy_rescale_log2,
        longest_first="true" if plan.schedule.longest_first else "false",
        divided=divided_of(problem, plan),
        columns="kOwnColumns" if plan.column_parts > 1 else "kHeadDimV",
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        elements=elements_of(problem),
        eight_bit=problem.eight_bit,
        widens=problem.widens,
        narrow=is_narrow(problem),
        stores_bytes=DTYPE_BYTES[problem.dtype_o] == 1,
        step_columns=32 if problem.eight_bit else 16,
        box_columns=128 // DTYPE_BYTES[problem.dtype_kv],
        q_copied=" / 2" if problem.eight_bit else "",
        kv_copied=" / 2" if DTYPE_BYTES[problem.dtype_kv] == 1 else "",
        keys_by="QElement, KvElement" if problem.eight_bit else "Element",
        tile_element=CPP_ELEMENTS[problem.dtype_bias] if problem.eight_bit else "Element",
        fragment_sources=fragment_sources,
        masks=masks,
        score_list=score_list_view(uses["score"], uses["mask"], scales=scaled),
        weights=weights_of(problem, uses["score"], scaled=scaled),
        softmax=fragment_view(uses["softmax"][0]),
        q_seq=fragment_view(uses["q_seq"][0]),
        kv_seq=fragment_view(uses["kv_seq"][0]),
        kv_iteration=uses["kv_iter"][0].fragment.struct,
        by_token=problem.token_scales,
        by_row_tile=problem.token_scales or tile is not None,
        scale_places=scale_places_of(problem),
        pair_mask=pair_mask_view(problem, uses, map="seen_keys"),
        listed=problem.listed,
        walk=LISTED_WALK if problem.listed else PLAIN_WALK,
        stops_at_bits=problem.attn_mask and masks.bounds_left,
        dropout=problem.dropout,
        max_logit=problem.max_logit,
        operands=tuple(operand_of(problem, name, uses) for name in "qkv"),
        score_tile=tile,
        output=tensor_view(problem, "o"),
        varlen=problem.varlen,
        joins=problem.continues,
        joined_columns=JoinedColumns(first_token=first_token_of(problem)),
        gather=problem.gather,
        packed=problem.q_seq == "packed",
        fills_gaps=fills_gaps(problem),
        lse_row=lse_row(problem),
    )


def divided_of(problem: Problem, plan: Plan) -> Divided | None:
    """How warps divide columns, where they do."""
    if plan.column_parts == 1:
        return None
    is_float = problem.dtype_o == "fp32"
    return Divided(
        parts=plan.column_parts,
        own_columns=plan.own_columns,
        store="store_float_rows<kOwnColumns>" if is_float else "store_rows<Element, kOwnColumns>",
        left="p.dim_v" if problem.gather else "kHeadDimV",
    )


def headers_of(problem: Problem) -> tuple[str, ...]:
    """Headers that a kernel includes, in their order."""
    wanted = {
        "context.cuh": True,
        "copy/cta_gathered.cuh": problem.gather,
        "copy/cta_pages.cuh": problem.paged,
        "copy/cta_rows.cuh": not problem.gather,
        "dropout_draw.cuh": problem.dropout,
        "mask_bits.cuh": problem.attn_mask,
        "asked_mask.cuh": problem.asks_mask,
        "maximum.cuh": problem.max_logit,
        "mma/atoms.cuh": True,
        "mma/atoms_fp8.cuh": problem.eight_bit,
        "mma/fragment.cuh": True,
        "mma/score_tile.cuh": problem.bias,
        "mma/store.cuh": not is_narrow(problem) and problem.dtype_o != "fp32",
        "mma/store_float.cuh": not is_narrow(problem) and problem.dtype_o == "fp32",
        "mma/store_quads.cuh": is_narrow(problem),
        "mma/transpose.cuh": problem.eight_bit,
        "ptx/async_copy.cuh": True,
        "ptx/barrier.cuh": True,
        "ptx/math.cuh": True,
        "ptx/matrix_move.cuh": True,
        "ptx/tma.cuh": True,  # the type of maps, of which it has none
        "scale.cuh": is_narrow(problem),
        "scheduler/block_map.cuh": problem.listed,
        "scheduler/gap_rows.cuh": fills_gaps(problem),
        "scheduler/kv_blocks.cuh": True,
        "scheduler/packed_tiles.cuh": problem.q_seq == "packed",
        "scheduler/tile_order.cuh": True,
        "softmax/join.cuh": problem.continues,
        "softmax/online.cuh": True,
        "softmax/row.cuh": True,
        "token_scales.cuh": problem.token_scales,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def is_narrow(problem: Problem) -> bool:
    """Whether keys and values have 8 bits."""
    return DTYPE_BYTES[problem.dtype_kv] == 1


def fills_gaps(problem: Problem) -> bool:
    """Whether rows of no sequence are filled, which are left as they are where outputs join."""
    return problem.q_seq != "dense" and not problem.continues


def weights_of(problem: Problem, scores: list[FragmentUse], *, scaled: bool) -> Weights:
    """How scores become weights. scaled: whether they come to the softmax scaled."""
    stored = problem.eight_bit or problem.widens
    scale_log2 = "scale_log2" if stored else "p.scale_log2"
    natural = "{}" if scaled else f"{{}} * kLn2 * {scale_log2}"
    shifted = " - shift * kLn2" if problem.eight_bit else ""
    slack = "slack" if problem.eight_bit else "kLazyRescaleLog2"
    unseen = f"{{{{-kInfinity, -kInfinity}}, {{0.f, 0.f}}, {slack}}}"
    held = f"{{{unseen}, {{-kInfinity, -kInfinity}}, {{0.f, 0.f}}}}"
    return Weights(
        scale_log2=scale_log2,
        unit="kLog2E" if scaled else scale_log2,
        shift="shift" if problem.eight_bit else "0.f",
        slack=slack,
        small=bool(scores) and scores[0].fragment.small,
        row_maximum=natural.format("state[m].row_max[half]") + shifted,
        largest_score=natural.format("largest[m][half]"),
        pack="pack_positive_pairs" if problem.dropout else "pack_pairs",
        element="Fp16" if problem.widens else "Element",
        keep_factor=" * p.keep_scale" if problem.dropout else "",
        rows="HeldRows" if problem.token_scales else "RowState",
        no_key=held if problem.token_scales else unseen,
    )


def elements_of(problem: Problem) -> tuple[Alias, ...]:
    """Types of elements by their names in templates."""
    q, kv = CPP_ELEMENTS[problem.dtype_q], CPP_ELEMENTS[problem.dtype_kv]
    if not is_narrow(problem):
        return (Alias("Element", q),)
    output = Alias("Output", CPP_ELEMENTS.get(problem.dtype_o, "float"))
    if problem.widens:
        return (Alias("Element", q), Alias("KvElement", kv), output)
    return (Alias("Element", "E4m3"), Alias("QElement", q), Alias("KvElement", kv), output)


def lse_row(problem: Problem) -> str:
    """C++: where a head's LSE begins."""
    if problem.q_seq == "dense":
        room = "p.lse_room" if problem.continues else "ctx.q_len"
        return f"(static_cast<long long>(ctx.batch) * p.heads_q + ctx.head) * {room}"
    return f"q_sequence(p).place(ctx.batch, {first_token_of(problem)}, ctx.head, p.heads_q)"


def first_token_of(problem: Problem) -> str:
    """C++: the first token of a sequence; empty where all have one length."""
    if not problem.varlen:
        return ""
    return FIRST_TOKEN.format("q_sequence(p)").replace("batch", "ctx.batch")
