"""Views, 8-bit backward: values of the templates of its three kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import DTYPE_BYTES, Problem
from ...mask_view import PairMaskView, pair_mask_view
from ...plan import template_of
from ...support.around import ConvertPlan
from ...support.view_parts import (
    ZEROED_HALVES,
    ZEROED_TURNS,
    Alias,
    ScoresView,
    SequenceView,
    Uses,
    q_len_of,
    scores_view,
    sequence_view,
    structs_of,
    tensor_row_of,
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
from .fp8_choices import (
    column_parts,
    image_bytes,
    is_crowded,
    key_image_bytes,
    leaves_rows,
    part_columns,
    staged_blocks,
    steps_of,
)
from .fp8_headers import convert_headers, main_headers, turning_headers
from .fp8_products import WIDE, GradientProducts, products_of
from .plan import BackwardPlan, TurningPlan
from .view_jobs import Gap, JobsView, VisitsView, gaps_of, jobs_view, visits_view
from .view_main import BlockMapFunction, Constant, Product, smem_constants

# By what weights of at most 1 are multiplied to be stored, where a call does not say, C++: the
# largest power of two that does not saturate; and the largest numbers there are.
OWN_SCALES = {"e4m3": "0x1p8f", "e5m2": "0x1p15f"}
LARGEST = {"e4m3": "0x1.cp8f", "e5m2": "0x1.cp15f"}


@dataclass(frozen=True)
class PtxTypes:
    """The types of operands in products, as PTX names them."""

    q: str
    kv: str
    d_o: str


@dataclass(frozen=True)
class Boxes:
    """How many boxes the columns of a block's queries and output gradients take, C++: factors with
    their sign of multiplication, empty where it is one."""

    q: str
    v: str


@dataclass(frozen=True)
class Halves:
    """Columns of a half of Q's, and of V's."""

    qk: int
    v: int


@dataclass(frozen=True)
class StoredView:
    """A tensor's elements: their struct, C++; whether they have 8 bits, and bytes of each.

    columns: of a box that the copy engine stores. pair: the C++ type of two neighbours.
    """

    element: str
    eight_bit: bool
    bytes: int
    columns: int
    pair: str


@dataclass(frozen=True, kw_only=True)
class Fp8View:
    """Values of fp8.cu.j2: dK, dV and sums of dQ. Strings are C++.

    headers, structs: lines that include headers; the fragments in use. element, d_o_element:
    structs of what weights, and gradients of scores, are stored as; gradient: of dK and dV.
    own_scale_s: the scale of weights where the call has none. tile_m, tile_n: queries and keys a
    tile. stages: buffers for all that blocks have. held_steps: of 32 columns of keys that consumers
    have in registers; holds_keys: whether these are all. gradients_late: whether products of output
    gradients and values begin when weights are there, for want of registers. turned_bytes,
    turned_key_bytes: of a block's queries and output gradients, and of a tile's keys, transposed.
    deterministic: whether tiles add to dQ in an order, which begins with the last keys if
    descending; looks_ahead: whether a thread that adds asks for its next turn meanwhile, for which
    halves of sequences that vary leave it no registers. one_stage: whether dK is staged where dV
    was, for want of room; hides_rest: whether scores behind a sequence's last query are hidden, for
    which a tensor of theirs may have any. heads_matter: whether anything changes from one query
    head to the next. prefetched: parameters that map tensors. halves: whether tiles are drawn for
    half of the gradients' columns at a time; leaves_rows: whether these leave to dk and dv from
    registers. products: how weights and dS are multiplied. boxes: of a block's rows.

    score_product: S and dP, the columns and the lengths of their chains; d*_product: of gradients.
    ptx: types of operands. Others as in `MainView` and `KeyTilesView`.
    """

    kernel: KernelView
    threads: int
    headers: str
    structs: str
    element: str
    d_o_element: str
    gradient: StoredView
    own_scale_s: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    consumers: int
    producer_registers: int
    consumer_registers: int
    stages: int
    held_steps: int
    holds_keys: bool
    gradients_late: bool
    turned_bytes: int
    turned_key_bytes: int
    smem: tuple[Constant, ...]
    masks: MaskListView
    scores: ScoresView
    queries: SequenceView
    keys: SequenceView
    kv_alias: Alias
    varlen: bool
    revisits: bool
    gathered: tuple[TensorView, ...]
    row_block: int
    pair_mask: PairMaskView | None
    block_maps: tuple[BlockMapFunction, ...]
    one_stage: bool
    hides_rest: bool
    heads_matter: bool
    dropout: bool
    jobs: JobsView
    gaps: tuple[Gap, ...]
    visits: VisitsView
    ptx: PtxTypes
    score_product: Product
    dk_product: Product
    dv_product: Product
    dq_product: Product
    deterministic: bool
    descending: bool
    looks_ahead: bool
    prefetched: tuple[str, ...]
    halves: bool
    leaves_rows: bool
    products: GradientProducts
    boxes: Boxes
    dk: TensorView
    dv: TensorView
    tells_visits: bool = False  # of key tiles, as loaders of 16 bits do


@dataclass(frozen=True, kw_only=True)
class TurningView:
    """Values of fp8_prepare.cu.j2: D, LSE, and what lies transposed. Strings are C++.

    o: the output's elements; d_o_element: the struct of its gradient's. tile_n: keys of a tile;
    turned_bytes, turned_key_bytes: of all columns. halves: of columns that make two images of a
    block, None where they make one. widens: the struct of elements of queries and keys that are
    widened in place of their transposition, empty where none are; key_columns: of a tile's keys, in
    whole steps. staged_blocks: boxes of a block's rows in shared memory at a
    time. Others as in `PrepareView`.
    """

    kernel: KernelView
    threads: int
    headers: str
    structs: str
    head_dim_qk: int
    head_dim_v: int
    row_block: int
    tile_n: int
    turned_bytes: int
    turned_key_bytes: int
    halves: Halves | None
    widens: str
    key_columns: int
    staged_blocks: int
    o: StoredView
    d_o_element: str
    own_scale_s: str
    dropout: bool
    varlen: bool
    queries: SequenceView
    keys: SequenceView
    parts: str | None
    zeroed_turns: str
    q_len: str
    tensor_row: str


@dataclass(frozen=True, kw_only=True)
class Fp8ConvertView:
    """Values of fp8_convert.cu.j2: dQ from its sums. Strings are C++.

    turns: where the block's first count of tiles lies. Others as in `ConvertView`, with the
    elements of dQ.
    """

    kernel: KernelView
    threads: int
    headers: str
    structs: str
    gradient: StoredView
    head_dim_qk: int
    row_block: int
    varlen: bool
    queries: SequenceView
    parts: str | None
    zeroed_turns: str
    q_len: str
    tensor_row: str
    turns: str
    block_parts: int
    dq_columns: int


def own_scale_s(problem: Problem) -> str:
    """C++: by what weights are multiplied where a call does not say; those that dropout keeps are
    larger than 1."""
    if problem.dropout:
        return f"own_scale_of_kept({LARGEST[problem.dtype_q]}, p.keep_share)"
    return OWN_SCALES[problem.dtype_q]


def stored_view(dtype: str) -> StoredView:
    """How elements of a dtype are stored."""
    count = DTYPE_BYTES[dtype]
    pair = "unsigned short" if count == 1 else "u32"
    return StoredView(CPP_ELEMENTS[dtype], count == 1, count, 128 // count, pair)


def stored_as(problem: Problem, dtype: str) -> str:
    """The struct of what weights or dS are stored as where operands have a dtype, C++."""
    return WIDE if problem.mixed else CPP_ELEMENTS[dtype]


def fp8_view(
    problem: Problem, plan: BackwardPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> Fp8View:
    """Decide what fp8.cu.j2 renders. uses: its fragments by role."""
    masks, scores = uses["mask"], eight_bit_scores(uses)
    d, d_v = problem.head_dim_qk, problem.head_dim_v
    products, halves = products_of(problem), column_parts(problem) > 1
    return Fp8View(
        kernel=kernel_view(kernel, template_of(plan)),
        threads=plan.threads,
        headers=main_headers(problem),
        structs=structs_of(uses, root),
        element=stored_as(problem, problem.dtype_q),
        d_o_element=stored_as(problem, problem.dtype_of("d_o")),
        gradient=stored_view(problem.dtype_of("dk")),
        own_scale_s=own_scale_s(problem),
        head_dim_qk=d,
        head_dim_v=d_v,
        tile_m=plan.tile.m,
        tile_n=plan.tile.n,
        consumers=plan.consumers,
        producer_registers=plan.producer_registers,
        consumer_registers=plan.consumer_registers,
        stages=plan.q_stages,
        held_steps=plan.held_steps,
        holds_keys=plan.held_steps == steps_of(d),
        gradients_late=is_crowded(problem),
        turned_bytes=image_bytes(problem),
        turned_key_bytes=key_image_bytes(problem, plan.dq_columns * plan.consumers),
        smem=smem_constants(plan.smem),
        masks=mask_list_view(masks),
        scores=scores,
        queries=sequence_view(uses["q_seq"][0]),
        keys=sequence_view(uses["kv_seq"][0]),
        kv_alias=Alias("KvFetch", uses["kv_fetch"][0].fragment.struct),
        varlen=problem.varlen,
        revisits=problem.varlen,
        gathered=(),
        row_block=plan.row_block,
        pair_mask=pair_mask_view(problem, uses, of_keys=True),
        block_maps=(),
        one_stage=problem.bias and not leaves_rows(problem),
        hides_rest=problem.bias and problem.varlen,
        heads_matter=bool(problem.scores) or problem.attn_mask or problem.dropout,
        dropout=problem.dropout,
        jobs=jobs_view(problem, plan, "KvLoader{p, smem}", halves=halves),
        gaps=gaps_of(problem, plan),
        visits=visits_view(plan, looks_ahead=False),
        ptx=PtxTypes(problem.dtype_q, problem.dtype_kv, problem.dtype_of("d_o")),
        score_product=Product(plan.tile.m, (steps_of(d) - plan.held_steps, steps_of(d_v))),
        dk_product=Product(plan.dk_columns, (plan.tile.m // products.depth,)),
        dv_product=Product(plan.dv_columns, (plan.tile.m // products.depth,)),
        dq_product=Product(plan.dq_columns, (plan.tile.n // products.depth,)),
        deterministic=plan.deterministic,
        descending=plan.descending,
        looks_ahead=not (halves and problem.varlen),
        prefetched=tuple(recipe.field for recipe in kernel.tensor_maps),
        halves=halves,
        leaves_rows=leaves_rows(problem),
        products=products,
        boxes=Boxes("kQkBoxes * ", "kVBoxes * ") if halves else Boxes("", ""),
        dk=tensor_view(problem, "dk"),
        dv=tensor_view(problem, "dv"),
    )


def eight_bit_scores(uses: Uses) -> ScoresView:
    """Scores of a backward of 8-bit operands: by way of their list, whatever they read."""
    found = scores_view(uses["score"], uses["mask"])
    return replace(found, scaled_list=None, listed=bool(uses["score"]))


def turning_view(
    problem: Problem, plan: TurningPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> TurningView:
    """Decide what fp8_prepare.cu.j2 renders. uses: fragments of both sequences."""
    parts, d, d_v = column_parts(problem), problem.head_dim_qk, problem.head_dim_v
    halves = Halves(part_columns(problem, d), part_columns(problem, d_v))
    return TurningView(
        kernel=kernel_view(kernel, template_of(plan)),
        threads=plan.threads,
        headers=turning_headers(problem),
        structs=structs_of(uses, root) if problem.varlen else "",
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        row_block=plan.tile.m,
        tile_n=plan.tile.n,
        turned_bytes=parts * image_bytes(problem),
        turned_key_bytes=key_image_bytes(problem, plan.key_columns),
        halves=halves if parts > 1 else None,
        widens=CPP_ELEMENTS[problem.dtype_q] if problem.mixed else "",
        key_columns=plan.key_columns,
        staged_blocks=staged_blocks(problem),
        o=stored_view(problem.dtype_o),
        d_o_element=CPP_ELEMENTS[problem.dtype_of("d_o")],
        own_scale_s=own_scale_s(problem),
        dropout=problem.dropout,
        varlen=problem.varlen,
        queries=sequence_view(uses["q_seq"][0]),
        keys=sequence_view(uses["kv_seq"][0]),
        parts=None,
        zeroed_turns=ZEROED_HALVES if parts > 1 else ZEROED_TURNS,
        q_len=q_len_of(problem),
        tensor_row=tensor_row_of(problem),
    )


def fp8_convert_view(
    problem: Problem, plan: ConvertPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> Fp8ConvertView:
    """Decide what fp8_convert.cu.j2 renders. uses: the fragment of the queries' sequence."""
    return Fp8ConvertView(
        kernel=kernel_view(kernel, template_of(plan)),
        threads=plan.threads,
        headers=convert_headers(problem),
        structs=structs_of(uses, root) if problem.varlen else "",
        gradient=stored_view(problem.dtype_of("dq")),
        head_dim_qk=problem.head_dim_qk,
        row_block=plan.row_block,
        varlen=problem.varlen,
        queries=sequence_view(uses["q_seq"][0]),
        parts="kParts",
        zeroed_turns="",
        q_len=q_len_of(problem),
        tensor_row=tensor_row_of(problem),
        turns="2 * slot" if column_parts(problem) > 1 else "slot",
        block_parts=plan.parts,
        dq_columns=plan.dq_columns,
    )
