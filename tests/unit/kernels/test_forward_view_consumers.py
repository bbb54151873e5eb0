"""The view of a forward kernel, consumers: each decision, where it tells kernels apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.kernels.wgmma.forward import view_consumer, view_scores
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.kernels.wgmma.forward.view import bounds_of
from attngen.kernels.wgmma.forward.view_scores import Scores
from attngen.spec.problem import Problem
from tests.support.forward_kit import (
    ALIBI,
    BIAS,
    CAPPED,
    CAUSAL,
    DENSE,
    EAGER,
    EVEN,
    FP8,
    MASKED,
    PLAN,
    ROWS,
    THREE,
    TURNS,
    WINDOW,
    uses_in,
    with_pipeline,
    with_softmax,
)


def scores_of(problem: Problem, plan: Plan = PLAN) -> Scores:
    uses = uses_in(problem)
    return view_scores.scores_of(problem, plan, uses["score"], bounds_of(uses["mask"]))


def softmax_of(problem: Problem, plan: Plan = PLAN) -> view_consumer.Softmax:
    uses = uses_in(problem)
    return view_consumer.softmax_of(problem, plan, uses["softmax"][0], scores_of(problem, plan))


def blocks_of(problem: Problem, plan: Plan = PLAN) -> view_consumer.Blocks:
    bounds = bounds_of(uses_in(problem)["mask"])
    return view_consumer.blocks_of(problem, plan, bounds, scores_of(problem, plan))


@pytest.mark.parametrize(
    ("problem", "plan", "facts"),
    [
        (DENSE, PLAN, set()),
        (ALIBI, PLAN, {"linear", "line_in_products", "line_ahead", "skips_faint"}),
        (ALIBI, TURNS, {"linear", "line_in_products"}),
        (ALIBI, EAGER, {"linear", "line_in_products", "line_ahead"}),
        (replace(ALIBI, masks=()), PLAN, {"linear", "by_place"}),
        (
            replace(ALIBI, masks=("causal", "window")),
            PLAN,
            {"linear", "line_in_products", "line_ahead"},
        ),
        (CAPPED, PLAN, {"small", "by_place", "bent_late", "low_polynomial", "sums_tell"}),
        (CAPPED, EAGER, {"small", "by_place", "bent_late"}),
        (
            replace(CAPPED, dtype_q="fp16"),
            PLAN,
            {"small", "by_place", "bent_late", "low_polynomial"},
        ),
        (
            replace(CAPPED, masks=("window",)),
            PLAN,
            {"small", "by_place", "bent_late", "low_polynomial"},
        ),
        (replace(CAPPED, attn_mask=True), PLAN, {"small", "by_place"}),
        (BIAS, PLAN, {"scaled", "by_place", "pairs_ahead"}),
        (BIAS, with_pipeline(consumers=3), {"scaled", "by_place", "pairs_in_turn"}),
        (replace(BIAS, dropout=True), PLAN, {"scaled", "by_place", "pairs_in_turn"}),
        (
            replace(CAUSAL, scores=("softcap", "alibi")),
            PLAN,
            {"small", "by_place", "skips_far_keys"},
        ),
        (replace(DENSE, scores=("softcap", "alibi")), PLAN, {"small", "by_place"}),
    ],
)
def test_scores_are_treated_as_their_fragments_allow(
    problem: Problem, plan: Plan, facts: set[str]
) -> None:
    scores = scores_of(problem, plan)
    assert {name for name, value in vars(scores).items() if value is True} == facts


def test_scores_of_8_bits_keep_their_line_out_of_products() -> None:
    scores = scores_of(replace(FP8, masks=("causal",), scores=("alibi",)))
    assert scores.linear and not scores.line_in_products


def test_scores_name_the_arguments_of_their_preparation() -> None:
    assert scores_of(DENSE).arguments == ""
    assert scores_of(ALIBI).arguments == ", line"
    both = scores_of(replace(MASKED, scores=("alibi",)))
    assert both.arguments == ", line, seen"
    assert both.parameters == ", float (&line)[2], MaskBits<kTileN>& seen"


@pytest.mark.parametrize(
    ("problem", "plan", "order"),
    [
        (DENSE, PLAN, "ahead"),
        (DENSE, with_softmax(quarters_ahead=0), "rescaled_last"),
        (DENSE, with_softmax(quarters_ahead=0, rescale_first=True), "rescaled_first"),
        (MASKED, with_softmax(quarters_ahead=0), "rescaled_between"),
        (replace(MASKED, dropout=True), with_softmax(quarters_ahead=0), "rescaled_last"),
        (FP8, THREE, "at_once_or_promoted"),
        (FP8, replace(THREE, promote_blocks=1), "at_once"),
        (FP8, with_softmax(THREE, parts=2), "in_parts"),
    ],
)
def test_softmax_weighs_a_block_in_the_order_of_the_plan(
    problem: Problem, plan: Plan, order: str
) -> None:
    assert view_consumer.weighing_order(problem, plan) == order


def test_softmax_raises_maxima_rarely_where_it_keeps_them() -> None:
    def raising(problem: Problem, plan: Plan) -> tuple[str, str, str]:
        softmax = softmax_of(problem, plan)
        return softmax.find_maxima, softmax.grew, softmax.first_slack

    lazily = ", kLazyRescaleLog2"
    assert raising(DENSE, PLAN) == ("bound_maxima", "softmax.outgrow(state)", lazily)
    assert raising(DENSE, EAGER) == ("find_maxima", "true", "")
    first = with_softmax(rescale_first=True, quarters_ahead=0)
    assert raising(DENSE, first) == ("find_maxima", "softmax.outgrow(state)", lazily)
    assert raising(FP8, THREE)[::2] == ("bound_maxima", ", slack")


@pytest.mark.parametrize(
    ("problem", "plan", "kept", "trusted", "rows"),
    [
        (DENSE, PLAN, False, False, "RowState"),
        (DENSE, with_pipeline(consumers=4), True, False, "RowState"),
        (WINDOW, PLAN, True, False, "RowState"),
        (replace(WINDOW, max_logit=True), PLAN, False, False, "RowState"),
        (replace(WINDOW, scores=("alibi",)), PLAN, False, False, "RowState"),
        (FP8, THREE, False, False, "HeldRows"),
        (replace(FP8, masks=("causal",)), THREE, False, True, "TrustedRows"),
    ],
)
def test_softmax_looks_for_no_maximum_where_sums_tell(
    problem: Problem, plan: Plan, kept: bool, trusted: bool, rows: str
) -> None:
    softmax = softmax_of(problem, plan)
    assert (softmax.keeps_keys, softmax.trusts_sums, softmax.rows) == (kept, trusted, rows)


def test_softmax_says_how_a_maximum_is_kept() -> None:
    assert softmax_of(DENSE).row_maximum == "state.row_max[half] * kLn2 * p.scale_log2"
    assert softmax_of(BIAS).row_maximum == "state.row_max[half]"
    fp8 = softmax_of(FP8, with_softmax(quarters_ahead=0))
    assert fp8.row_maximum == "state.row_max[half] * kLn2 * scale_log2 - shift * kLn2"
    masked = softmax_of(replace(FP8, masks=("causal",)), THREE)
    assert (masked.row_maximum, masked.kept_maximum) == ("state.offset[half] * kLn2", "most")


def test_softmax_tracks_the_largest_score_where_rows_keep_less() -> None:
    wanted = replace(BIAS, max_logit=True)
    assert softmax_of(wanted).largest_score == "largest[half]"
    assert softmax_of(wanted, EAGER).largest_score == "state.row_max[half]"


@pytest.mark.parametrize(
    ("problem", "blocks", "block", "last"),
    [
        (DENSE, 0, "", ""),
        (FP8, 0, ", true", ", true"),
        (FP8, 1, ", false", ", false"),
        (FP8, 8, ", true", ", true"),
    ],
)
def test_promotion_says_what_a_product_joins(
    problem: Problem, blocks: int, block: str, last: str
) -> None:
    promotion = view_consumer.promotion_of(problem, replace(PLAN, promote_blocks=blocks))
    assert (promotion.add_block, promotion.add_last) == (block, last)
    assert (promotion.in_registers, promotion.in_memory) == (blocks == 1, blocks > 1)


@pytest.mark.parametrize(
    ("problem", "plan", "loop"),
    [
        (CAUSAL, PLAN, "plain"),
        (ALIBI, PLAN, "skipping_faint"),
        (replace(FP8, masks=("causal",)), THREE, "trusting"),
        (FP8, THREE, "promoting_in_step"),
        (FP8, replace(THREE, family="sm90_fwd_alone"), "summing_stored"),
        (FP8, with_softmax(THREE, parts=0), "promoting_between"),
    ],
)
def test_blocks_are_visited_by_the_loop_of_the_plan(
    problem: Problem, plan: Plan, loop: str
) -> None:
    assert blocks_of(problem, plan).loop == loop


def test_blocks_begin_and_end_where_rows_see_keys() -> None:
    rolling = blocks_of(WINDOW)
    assert (rolling.begin, rolling.end) == ("last_block", "block_end")
    assert rolling.full_begin == "max_of(blocks.full_begin, last_block)"
    assert not (rolling.finds_range or rolling.releases_q)
    causal = blocks_of(CAUSAL)
    assert (causal.begin, causal.end) == ("job.block_begin", "job.block_end")
    assert causal.finds_range and causal.releases_q and not causal.may_pass_over
    trusting = blocks_of(replace(FP8, masks=("causal",)), THREE)
    assert (trusting.own_end, trusting.full_end) == (True, "full_end")
    assert not blocks_of(FP8, THREE).own_end
    assert blocks_of(FP8, EVEN).first_own_row == "job.first_row"


def test_step_loads_bits_before_products_where_the_order_is_held() -> None:
    def loads(problem: Problem, plan: Plan = PLAN) -> tuple[bool, bool]:
        step = view_consumer.step_of(problem, plan, scores_of(problem, plan))
        return step.bits_before_products, step.bits_behind_products

    assert loads(DENSE) == (False, False)
    assert loads(MASKED) == (True, False)
    assert loads(replace(MASKED, dropout=True)) == (False, True)
    assert loads(MASKED, with_pipeline(consumers=3)) == (False, True)


def test_step_is_told_what_a_block_is() -> None:
    def told(problem: Problem, plan: Plan) -> str:
        step = view_consumer.step_of(problem, plan, scores_of(problem, plan))
        return f"{step.returned}: {step.template_parameters}"

    assert told(DENSE, PLAN) == "void: bool kMasked"
    assert told(FP8, THREE) == "void: bool kMasked, bool kDue = false"
    faint = "bool kFar = false, bool kAfterFaint = false"
    assert told(ALIBI, PLAN) == f"bool: bool kMasked, {faint}"


def test_output_leaves_as_the_plan_says() -> None:
    staged = view_consumer.output_of(DENSE, PLAN)
    assert not (staged.stores_rows or staged.one_releases_q)
    assert staged.staged_at == "kSmemO"
    over_q = view_consumer.output_of(WINDOW, with_pipeline(ROWS, output_over_q=True))
    assert (over_q.staged_at, over_q.one_releases_q) == ("kSmemQ", True)
    rows = view_consumer.output_of(DENSE, ROWS)
    assert (rows.rows_of_16_bits, rows.rows_of_32_bits) == (True, False)
    parts = view_consumer.output_of(replace(DENSE, dtype_o="fp32"), ROWS)
    assert (parts.rows_of_16_bits, parts.rows_of_32_bits) == (False, True)
    assert view_consumer.output_of(replace(FP8, dtype_o="e5m2"), PLAN).eight_bit
