"""View, consumers: the order of a block's softmax, sums, blocks of a tile, the output."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import Problem
from ...uses import FragmentUse
from ...view import FragmentView, fragment_view
from .plan import Plan
from .statements import drop_weights, keep_factor, raise_rarely, settle
from .traits import (
    converts,
    cuts_tiles,
    first_row_of,
    one_loader,
    raises_rarely,
    rest_columns,
    rolls,
    scale_log2,
)
from .view_scores import Bounds, Scores

JOINED_AHEAD = 128  # columns of an output that is there, which registers of up to 3 consumers hold


@dataclass(frozen=True)
class Softmax:
    """How the softmax of a block is written down. Strings but `order` are C++.

    fragment: how rows are finished. scale_log2: what products are multiplied by for scores in log2
    units; unit: what scores are, as they come to the softmax; shift: log2 of what stored weights
    are multiplied by. scale_is_read: whether these are members, read for each tile.
    rows, finished_rows: types of what is kept of rows, and of what finishes them.
    order: the macro of weights.cuh.j2 that weighs a block. in_parts: 8-bit weights, whose maxima
    may be outgrown by `slack`; ahead: some exponentials precede the wait for the product before;
    quarter_ahead: a quarter of a block; rescales_first, rescales_last: where weights of late scores
    have the output rescaled, if none is ahead; rescales_in_the_end: behind all else in a block.
    holds_order: the order in which a block's softmax meets the previous product is held: beside a
    mask's bits or dropout the compiler would await that product before it begins. Both, or scores
    beside them, leave no registers.
    raises_rarely: most blocks need but a bound of their maxima, since rows keep theirs until these
    are outgrown; raise_rarely: what raises them. Where the output is rescaled first, above 192, it
    gains nothing, and takes registers. find_maxima: the function; kinds: what the block's softmax
    has beside its width and its sums, as the last arguments of its template: scores along a line,
    or a large row's room set apart. settle: the statement by which scores of large rows become what
    they lack to their maxima.
    slack, first_slack: how far rows may outgrow maxima, and the same as the first block's argument;
    grew: whether maxima grew. tracks_largest: what rows keep is less than the largest score that
    they met, which is asked for.
    keeps_keys: no maximum is looked for where no key is hidden: what makes scores anew needs the
    block of keys until its weights are there, and so stages, and scores that are nothing but
    products. trusts_sums: the same of 8 bits, where what weights sum up to tells whether one is too
    large; without a mask it gains less at 4k keys and loses at 16k.
    row_maximum, kept_maximum, largest_score: of a row, scaled, as kept, and as met; row_sum: of the
    thread's weights of a row, as an LSE and normalised weights take them.
    drop_weights: the statement that zeroes dropped weights; empty where none is.
    """

    fragment: FragmentView
    scale_log2: str
    unit: str
    shift: str
    scale_is_read: bool
    rows: str
    finished_rows: str
    order: str
    in_parts: bool
    ahead: bool
    quarter_ahead: bool
    rescales_first: bool
    rescales_last: bool
    rescales_in_the_end: bool
    holds_order: bool
    raises_rarely: bool
    raise_rarely: str
    find_maxima: str
    kinds: str
    settle: str
    slack: str
    first_slack: str
    grew: str
    tracks_largest: bool
    keeps_keys: bool
    trusts_sums: bool
    row_maximum: str
    row_sum: str
    kept_maximum: str
    largest_score: str
    drop_weights: str


@dataclass(frozen=True)
class Promotion:
    """Where sums of 8-bit products go, which tensor cores cut to the bits of the running sum.

    in_registers: to a total, after each block; in_memory: to a float16 mean, after several.
    total: C++, what is summed over a tile. add_block, add_last: C++, whether a block's product, and
    the last one, join the sum; empty for 16 bits. if_due: C++, the condition on which a block's sum
    joins the mean.
    """

    in_registers: bool
    in_memory: bool
    total: str
    add_block: str
    add_last: str
    if_due: str


@dataclass(frozen=True)
class Step:
    """One block's step. template_parameters, returned: C++. bits_before_products,
    bits_behind_products: where an arbitrary mask's bits are loaded. lines_before_products,
    lines_ahead: whether lines of scores are made of the block at hand, or of the one behind it."""

    template_parameters: str
    returned: str
    bits_before_products: bool
    bits_behind_products: bool
    lines_before_products: bool
    lines_ahead: bool


@dataclass(frozen=True)
class Blocks:
    """The blocks of keys that a consumer visits of a tile, from the last to the first.

    own_end: it begins at the last block that its own rows see; may_pass_over: it passes over loaded
    blocks, or a tile, of which no row is its own; passed_values: C++, as many in the beginning.
    finds_range: whether it works out which blocks its rows see whole, though it visits all. step:
    C++, from a block to the next.
    end, begin: C++, of all blocks; full_end, full_begin: of those in which no key is hidden. loop:
    the macro of block_loops.cuh.j2 that visits these. first_row: C++, of the tile; first_own_row:
    C++, before which rows are another tile's. is_whole: C++, whether no pair of a block that a mask
    made before shows is hidden, empty without such a mask; told, found: whether the loader of keys
    says which one comes next, or consumers find it. releases_q: queries are released behind
    the last block.
    """

    own_end: bool
    may_pass_over: bool
    passed_values: str
    finds_range: bool
    step: str
    end: str
    begin: str
    full_end: str
    full_begin: str
    loop: str
    first_row: str
    first_own_row: str
    is_whole: str
    told: bool
    found: bool
    releases_q: bool


@dataclass(frozen=True)
class Output:
    """How the output leaves.

    columns: C++, those of a consumer; first_column: C++, the first of these, empty where it is 0.
    stores_rows: from registers to memory; rows_of_16_bits, rows_of_32_bits: which ones. Else it is
    staged: staged_at: C++, where. eight_bit: it is FP8. one_releases_q: one thread, not one a warp,
    releases queries. joins: it joins what is there; joins_ahead: which is read before the last
    product is awaited, as registers allow; joined: C++, columns read at once; in_parts: fewer than
    all. first_token: C++, of a sequence of an output that joins, empty where all have one length.
    lse_row: C++, where a head's LSE begins. keep_factor: C++, by what rows are multiplied for what
    dropout leaves of their weights; empty without.
    """

    columns: str
    first_column: str
    stores_rows: bool
    rows_of_16_bits: bool
    rows_of_32_bits: bool
    staged_at: str
    eight_bit: bool
    one_releases_q: bool
    joins: bool
    joins_ahead: bool
    joined: str
    in_parts: bool
    first_token: str
    lse_row: str
    keep_factor: str


def softmax_of(problem: Problem, plan: Plan, use: FragmentUse, scores: Scores) -> Softmax:
    """The order of a block's softmax. use: the fragment that finishes rows."""
    order, log2 = plan.softmax, scale_log2(problem)
    trusts = trusts_sums(problem, plan)
    ahead = order.quarters_ahead > 0
    lazy = order.lazy_rescale_log2 > 0
    rarely = raises_rarely(plan, late=scores.bent_late)
    tracks = problem.max_logit and lazy
    slack = "slack" if order.parts else "kLazyRescaleLog2"
    met = "largest[half]" if tracks else "state.row_max[half]"
    scaled_max = _in_score_units(problem, scores, "state.row_max[half]")
    shifted = " - shift * kLn2" if problem.eight_bit else ""
    return Softmax(
        fragment=fragment_view(use),
        scale_log2=log2,
        unit="kLog2E" if scores.scaled else log2,
        shift="shift" if problem.eight_bit else "0.f",
        scale_is_read=converts(problem),
        rows="TrustedRows" if trusts else "HeldRows" if order.parts else "RowState",
        finished_rows="TrustedRows" if trusts else "RowState",
        order=weighing_order(problem, plan),
        in_parts=order.parts > 0,
        ahead=ahead,
        quarter_ahead=order.quarters_ahead == 1,
        rescales_first=order.rescale_first and not ahead,
        rescales_last=not (order.rescale_first or ahead),
        rescales_in_the_end=ahead and not scores.bent_late,
        holds_order=holds_order(problem, plan),
        raises_rarely=rarely,
        raise_rarely=raise_rarely(problem, slack),
        find_maxima="bound_maxima" if rarely else "find_maxima",
        kinds=_kinds(problem, plan, rarely=rarely, linear=scores.linear),
        settle=settle(problem, lazy=lazy),
        slack=slack,
        first_slack="" if trusts or not (order.parts or lazy) else f", {slack}",
        grew="softmax.outgrow(state)" if lazy else "true",
        tracks_largest=tracks,
        keeps_keys=keeps_keys(problem, plan),
        trusts_sums=trusts,
        row_maximum="state.offset[half] * kLn2" if trusts else scaled_max + shifted,
        row_sum="plain_sum[half]" if problem.token_scales else "state.row_sum[half]",
        kept_maximum="most" if trusts else "state.row_max[half]",
        largest_score=_in_score_units(problem, scores, met),
        drop_weights=drop_weights(problem),
    )


def _kinds(problem: Problem, plan: Plan, *, rarely: bool, linear: bool) -> str:
    """C++: last arguments of the block softmax's template.

    Where lengths vary, registers are fewer, and a choice of a row's room left 16 exponentials ahead
    of the wait at head dim 128 without a mask, 35 with one. Set apart it leaves 21 and 37, as for
    dense operands, which lose 2 with it apart, and so do pages beside a mask.
    """
    if linear:
        return ", true"
    hidden_pages = problem.paged and bool(problem.masks)
    apart = problem.varlen and rarely and plan.softmax.quarters_ahead > 0 and not hidden_pages
    return ", false, true" if apart else ""


def trusts_sums(problem: Problem, plan: Plan) -> bool:
    """Whether sums of 8-bit weights tell where a maximum is needed."""
    return one_loader(problem, plan) and bool(problem.masks)


def keeps_keys(problem: Problem, plan: Plan) -> bool:
    """Whether blocks of keys are kept until weights made without a maximum are there."""
    staged = plan.pipeline.consumers == 4 or rolls(problem, plan)
    return staged and not (problem.scores or problem.max_logit)


def holds_order(problem: Problem, plan: Plan) -> bool:
    """Whether the order of a block's softmax and the previous product is held."""
    either = problem.attn_mask != problem.dropout
    either = either and not problem.listed
    return either and not problem.scores and plan.pipeline.consumers == 2


def weighing_order(problem: Problem, plan: Plan) -> str:
    """The macro of weights.cuh.j2 that weighs a block."""
    order = plan.softmax
    if order.parts == 1:
        return "at_once_or_promoted" if plan.promote_blocks > 1 else "at_once"
    if order.parts:
        return "in_parts"
    if order.quarters_ahead:
        return "ahead"
    if order.rescale_first:
        return "rescaled_first"
    return "rescaled_between" if holds_order(problem, plan) else "rescaled_last"


def _in_score_units(problem: Problem, scores: Scores, value: str) -> str:
    """C++: a score as kept, in natural units."""
    return value if scores.scaled else f"{value} * kLn2 * {scale_log2(problem)}"


def promotion_of(problem: Problem, plan: Plan) -> Promotion:
    """Where sums of products go."""
    blocks, eight_bit = plan.promote_blocks, problem.eight_bit
    in_registers = blocks == 1
    joins = "" if not eight_bit else ", true"
    return Promotion(
        in_registers=in_registers,
        in_memory=blocks > 1,
        total="total" if in_registers else "sum",
        add_block=", false" if in_registers else joins,
        add_last=", false" if in_registers and eight_bit else joins,
        if_due="if (due)" if trusts_sums(problem, plan) else "if constexpr (kDue)",
    )


def step_of(problem: Problem, plan: Plan, scores: Scores) -> Step:
    """The signature of a block's step, and when it loads bits."""
    parameters = ["bool kMasked"]
    if plan.softmax.parts and plan.promote_blocks > 1:
        parameters += ["bool kDue = false"]
    if scores.skips_faint:
        parameters += ["bool kFar = false", "bool kAfterFaint = false"]
    held = holds_order(problem, plan)
    return Step(
        template_parameters=", ".join(parameters),
        returned="bool" if scores.skips_faint else "void",
        bits_before_products=problem.attn_mask and held,
        bits_behind_products=problem.attn_mask and not held,
        lines_before_products=scores.keeps_lines and problem.listed,
        lines_ahead=scores.keeps_lines and not problem.listed,
    )


def blocks_of(problem: Problem, plan: Plan, bounds: Bounds, scores: Scores) -> Blocks:
    """The blocks of keys that a consumer visits."""
    rolling, alone = rolls(problem, plan), one_loader(problem, plan)
    # Where few of the tile's lie behind it, since others wait for what it passes over.
    own_end = rolling or (alone and bounds.right and bounds.steady)
    begin = "last_block" if rolling else "job.block_begin"
    passed = "job.block_end - block_end"
    trusts = trusts_sums(problem, plan)
    return Blocks(
        own_end=own_end,
        may_pass_over=rolling or alone,
        passed_values=f"passed_v + {passed}" if rolling else passed,
        finds_range=(bounds.left or bounds.right) and not own_end,
        step="block = next_block" if problem.listed else "--block",
        is_whole=_is_whole(bounds) if problem.listed else "",
        told=problem.listed and not problem.gather,
        found=problem.listed and problem.gather,
        end="block_end" if own_end else "job.block_end",
        begin=begin,
        full_end="full_end" if trusts else "blocks.full_end",
        full_begin=f"max_of(blocks.full_begin, {begin})" if bounds.left else begin,
        loop=block_loop(problem, plan, scores),
        first_row=first_row_of(problem, plan, "job.row_block"),
        first_own_row="job.first_row" if cuts_tiles(problem, plan) else "0",
        releases_q=not (plan.pipeline.q_in_registers or rolling),
    )


def _is_whole(bounds: Bounds) -> str:
    """C++: whether a block that a mask made before shows is seen whole, by other masks, too."""
    tests = ["next_whole"]
    tests += ["block < blocks.full_end"] * bounds.right
    tests += ["block >= blocks.full_begin"] * bounds.left
    return " && ".join(tests)


def block_loop(problem: Problem, plan: Plan, scores: Scores) -> str:
    """The macro of block_loops.cuh.j2 that visits blocks in which no key is hidden. Those that
    promote sums have code of their own; what bends scores leaves no registers for it."""
    if problem.listed:
        return "listed_blocks"
    if trusts_sums(problem, plan):
        return "trusting"
    if plan.promote_blocks > 1:
        if not plan.softmax.parts:
            return "promoting_between"
        return "summing_stored" if plan.sums_stored else "promoting_in_step"
    return "skipping_faint" if scores.skips_faint else "plain"


def lse_row(problem: Problem) -> str:
    """C++: where a head's LSE begins."""
    if problem.varlen:
        return "sequence.place(ctx.batch, sequence.first_token(q_index(job)), ctx.head, p.heads_q)"
    room = "p.lse_room" if problem.continues else "ctx.q_len"
    return f"(static_cast<long long>(ctx.batch) * p.heads_q + ctx.head) * {room}"


def output_of(problem: Problem, plan: Plan) -> Output:
    """How the output leaves."""
    float32, over_q = problem.dtype_o == "fp32", plan.pipeline.output_over_q
    consumers = plan.pipeline.consumers
    columns = "kOwnColumns" if rest_columns(problem, plan) else "kHeadDimV"
    return Output(
        columns=columns,
        first_column="",
        stores_rows=plan.stores_rows,
        rows_of_16_bits=plan.stores_rows and not float32,
        rows_of_32_bits=float32,
        staged_at="kSmemQ" if over_q else "kSmemO",
        eight_bit=problem.dtype_o in ("e4m3", "e5m2"),
        one_releases_q=rolls(problem, plan) and over_q,
        joins=problem.continues,
        first_token="q_sequence(p).first_token(ctx.batch)" if problem.varlen else "",
        joins_ahead=problem.continues and problem.head_dim_v <= JOINED_AHEAD and consumers < 4,
        joined=columns,
        in_parts=False,
        lse_row=lse_row(problem),
        keep_factor=keep_factor(problem),
    )
