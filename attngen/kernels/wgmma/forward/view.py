"""View: what the templates of a forward kernel read, each decision made and each value named."""

from __future__ import annotations

from dataclasses import dataclass

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...base import Axis
from ...mask_view import PairMaskView, pair_mask_view
from ...plan import template_of
from ...uses import FragmentUse
from ...view import (
    KernelView,
    MaskListView,
    ScoreListView,
    TensorView,
    kernel_view,
    mask_list_view,
    score_list_view,
    tensor_view,
)
from ...view_axis import AxisView, axis_view
from . import (
    traits,
    view_barriers,
    view_constants,
    view_consumer,
    view_loads,
    view_rest,
    view_scores,
)
from .plan import Plan
from .view_barriers import Barriers
from .view_constants import Constants, Elements, Products
from .view_consumer import Blocks, Output, Promotion, Softmax, Step
from .view_loads import Loads, Scheduler, Side
from .view_rest import Rest
from .view_scores import Bounds, Scores


@dataclass(frozen=True)
class ForwardView:
    """All that the templates of a forward kernel name.

    The kernel: kernel: its symbol, template and parameters. headers: what it includes, in order.
    threads, ctas: of a CTA, and of an SM.

    Formats: head_dim_qk, head_dim_v: of tiles. elements: types of operands. eight_bit: Q, K and V
    are FP8. widens: K and V alone are, and become 16 bits. converter: C++, the struct that a
    warpgroup between loaders and consumers runs, or empty. transposer: C++, who transposes V.
    constants: of the plan and of shared memory. products: the two products.

    Fragments: fragment_sources: C++, their structs, each once. masks, score_list: as the common
    macros take them; score_list is None without scores. scores: what happens to scores. pair_mask:
    where it finds an arbitrary mask; listed: which was made before, with its blocks. dropout,
    max_logit: as the problem says. score_tile: the parameter of the tensor that scores read in
    tiles, or None.

    Where data lies: gather: threads copy rows. paged: keys lie in pages. varlen: lengths are told
    on the device. q_side, kv_side: the two sequences. kv_fetch, kv_iteration: C++, structs.
    tensors: operands whose rows are found by their addresses. output_rows: the output as one.

    Tiles and loads: job_fields: members of a job. query_axis: how sequences are ordered, None where
    lengths are equal; orders_few: CTAs order few themselves; fills_gaps: rows of no sequence are
    filled. cuts_tiles: tiles are of two sizes. scheduler: how they are drawn. waits_at_first_tile:
    the kernel in front may run until then. loads: what loads operands. first_consumer: the first
    consumer's warpgroup. barriers: all mbarriers.

    Consumers: take_turns, q_in_registers: as the plan says. rolls: each visits the blocks that its
    own rows see. blocks, step: blocks of a tile, and a step of one. softmax: its order. promotion:
    of 8-bit sums. sums_stored: products sum the weights as they are stored, for calls that want the
    output alone. output: how it leaves. rest: columns that a second warpgroup has of it, or None.
    """

    kernel: KernelView
    headers: tuple[str, ...]
    threads: int
    ctas: int
    # Formats.
    head_dim_qk: int
    head_dim_v: int
    elements: Elements
    eight_bit: bool
    widens: bool
    converter: str
    transposer: str
    constants: Constants
    products: Products
    # Fragments.
    fragment_sources: tuple[str, ...]
    masks: MaskListView
    score_list: ScoreListView | None
    scores: Scores
    pair_mask: PairMaskView | None
    listed: bool
    dropout: bool
    max_logit: bool
    score_tile: str | None
    # Where data lies.
    gather: bool
    paged: bool
    varlen: bool
    q_side: Side
    kv_side: Side
    kv_fetch: str
    kv_iteration: str
    tensors: tuple[TensorView, ...]
    output_rows: TensorView
    # Tiles and loads.
    job_fields: tuple[str, ...]
    query_axis: AxisView | None
    orders_few: bool
    fills_gaps: bool
    cuts_tiles: bool
    scheduler: Scheduler
    waits_at_first_tile: bool
    loads: Loads
    first_consumer: int
    barriers: Barriers
    # Consumers.
    take_turns: bool
    q_in_registers: bool
    rolls: bool
    blocks: Blocks
    step: Step
    softmax: Softmax
    promotion: Promotion
    sums_stored: bool
    output: Output
    rest: Rest | None


def forward_view(
    problem: Problem,
    plan: Plan,
    uses: dict[str, list[FragmentUse]],
    kernel: KernelEntry,
    fragment_sources: tuple[str, ...],
) -> ForwardView:
    """The view of the kernel that computes the forward `problem` as `plan` says.

    uses: its fragments by role. kernel: its launch description. fragment_sources: the fragments'
    structs.
    """
    masks = mask_list_view(uses["mask"])
    bounds = bounds_of(uses["mask"])
    scores = view_scores.scores_of(problem, plan, uses["score"], bounds)
    reads_tile = (tile := next((use.tile for use in uses["score"] if use.tile), None)) is not None
    return ForwardView(
        kernel=kernel_view(kernel, template_of(plan)),
        headers=view_constants.headers_of(problem, plan, reads_tile),
        threads=plan.threads,
        ctas=plan.ctas,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        elements=view_constants.elements_of(problem),
        eight_bit=problem.eight_bit,
        widens=problem.widens,
        converter=view_loads.converter_of(problem, plan),
        transposer="KeyTransposer" if traits.one_loader(problem, plan) else "ColumnTransposer",
        constants=view_constants.constants_of(problem, plan),
        products=view_constants.products_of(problem, plan, scores.line_in_products),
        fragment_sources=fragment_sources,
        masks=masks,
        score_list=score_list_of(uses, scores),
        scores=scores,
        pair_mask=pair_mask_view(problem, uses),
        listed=problem.listed,
        dropout=problem.dropout,
        max_logit=problem.max_logit,
        score_tile=tile,
        gather=problem.gather,
        paged=problem.paged,
        varlen=problem.varlen,
        q_side=view_loads.side_of("q", problem, uses["q_seq"][0]),
        kv_side=view_loads.side_of("kv", problem, uses["kv_seq"][0]),
        kv_fetch=uses["kv_fetch"][0].fragment.struct,
        kv_iteration=uses["kv_iter"][0].fragment.struct,
        tensors=gathered_tensors(problem),
        output_rows=tensor_view(problem, "o"),
        job_fields=tuple(view_loads.job_fields(problem, plan)),
        query_axis=query_axis(problem, plan),
        orders_few=plan.orders_few,
        fills_gaps=traits.fills_gaps(problem, plan),
        cuts_tiles=traits.cuts_tiles(problem, plan),
        scheduler=view_loads.scheduler_of(
            problem, plan, skips_far_keys=scores.skips_far_keys, bounds_left=bounds.left
        ),
        waits_at_first_tile=view_loads.waits_at_first_tile(problem, plan),
        loads=view_loads.loads_of(problem, plan, uses, reads_tile),
        first_consumer=first_consumer(plan),
        barriers=view_barriers.barriers_of(problem, plan, reads_tile),
        take_turns=plan.pipeline.take_turns,
        q_in_registers=plan.pipeline.q_in_registers,
        rolls=traits.rolls(problem, plan),
        blocks=view_consumer.blocks_of(problem, plan, bounds, scores),
        step=view_consumer.step_of(problem, plan, scores),
        softmax=view_consumer.softmax_of(problem, plan, uses["softmax"][0], scores),
        promotion=view_consumer.promotion_of(problem, plan),
        sums_stored=plan.sums_stored,
        output=view_consumer.output_of(problem, plan),
        rest=view_rest.rest_of(problem, plan),
    )


def score_list_of(uses: dict[str, list[FragmentUse]], scores: Scores) -> ScoreListView | None:
    """The list of scores, which are told of lines where the kernel keeps them."""
    lined = bool(scores.lines)
    return score_list_view(uses["score"], uses["mask"], scales=scores.scaled, keeps_lines=lined)


def first_consumer(plan: Plan) -> int:
    """The warpgroup that is the first consumer: behind the others, but for the one that has the
    rest of the output's columns."""
    return plan.threads // 128 - plan.pipeline.consumers - plan.shares_output


def bounds_of(masks: list[FragmentUse]) -> Bounds:
    """Sides on which any of the masks hides keys."""
    return Bounds(
        left=any(use.bounds_left for use in masks),
        right=any(use.bounds_right for use in masks),
        past=any(use.fragment.past for use in masks),
        steady=all(use.fragment.steady for use in masks),
    )


def gathered_tensors(problem: Problem) -> tuple[TensorView, ...]:
    """Operands whose rows threads copy."""
    names = ("q", "k", "v") if problem.gather else ()
    return tuple(tensor_view(problem, name) for name in names)


def query_axis(problem: Problem, plan: Plan) -> AxisView | None:
    """Tiles of queries, as sequences are ordered by them; None where lengths are equal."""
    if not problem.varlen:
        return None
    schedule = plan.schedule
    axis = Axis(
        rows=plan.tile.m,
        group_heads=schedule.group_heads,
        group_bytes=schedule.kv_group_bytes,
        sums=False,
        follows=False,
        tail_share=schedule.tail_share,
    )
    return axis_view(problem, axis, of_queries=True, orders_few=plan.orders_few)
