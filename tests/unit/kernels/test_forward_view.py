"""The view of a forward kernel: each decision for problems and plans that tell it from others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngen.fragments import features
from attngen.kernels.base import Pipeline, Plan, Schedule, SmemRegion, SoftmaxOrder, Tile
from attngen.kernels.uses import FragmentUse, uses_of
from attngen.kernels.wgmma.forward import (
    traits,
    view_constants,
    view_consumer,
    view_loads,
    view_scores,
)
from attngen.kernels.wgmma.forward.view import bounds_of, query_axis
from attngen.kernels.wgmma.forward.view_scores import Scores
from attngen.spec.problem import Problem

DENSE = Problem(
    direction="fwd",
    dtype_q="bf16",
    dtype_kv="bf16",
    dtype_o="bf16",
    head_dim_qk=128,
    head_dim_v=128,
    masks=(),
    scores=(),
    softmax="vanilla",
    q_seq="dense",
    kv_seq="dense",
    kv_fetch="tma",
    kv_iter="range",
)
FP8 = replace(DENSE, dtype_q="e4m3", dtype_kv="e4m3")
WIDENED = replace(DENSE, dtype_kv="e5m2")
GATHER = replace(DENSE, kv_fetch="gather")
PAGED = replace(DENSE, kv_fetch="page_tma")
PACKED = replace(DENSE, q_seq="packed", kv_seq="packed")
WINDOW = replace(DENSE, masks=("window",))
CAUSAL = replace(DENSE, masks=("causal",))
ALIBI = replace(CAUSAL, scores=("alibi",))
CAPPED = replace(DENSE, scores=("softcap",))
BIAS = replace(DENSE, scores=("post_scale_bias",))
MASKED = replace(DENSE, attn_mask=True)
PLAN = Plan(
    arch="sm_90a",
    family="sm90_fwd",
    tile=Tile(128, 64),
    pipeline=Pipeline(
        consumers=2,
        k_stages=3,
        v_stages=2,
        raw_stages=0,
        raw_keys=0,
        producer_registers=40,
        consumer_registers=232,
        take_turns=False,
        q_in_registers=False,
        output_over_q=False,
    ),
    schedule=Schedule(
        dynamic=True, longest_first=True, kv_group_bytes=1 << 20, group_heads=8, tail_share=4
    ),
    softmax=SoftmaxOrder(8, rescale_first=False, pair_sums=True, quarters_ahead=1),
    promote_blocks=0,
    smem=(SmemRegion("O", 0, 1024), SmemRegion("Job", 1024, 24)),
    smem_bytes=1048,
    threads=384,
    operand_registers=0,
    why=(),
)
ORDER = SmemRegion("Order", 1048, 64)


def with_pipeline(plan: Plan = PLAN, **changes: Any) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, **changes))


def with_softmax(plan: Plan = PLAN, **changes: Any) -> Plan:
    return replace(plan, softmax=replace(plan.softmax, **changes))


THREE = replace(with_pipeline(consumers=3, raw_stages=2, raw_keys=64), promote_blocks=30)
THREE = with_softmax(THREE, quarters_ahead=0, parts=1)
EVEN = replace(THREE, schedule=replace(PLAN.schedule, longest_first=False))
TURNS = with_pipeline(take_turns=True)
FEW = replace(PLAN, smem=(*PLAN.smem, ORDER))
ROWS = replace(PLAN, smem=PLAN.smem[1:])
EAGER = with_softmax(lazy_rescale_log2=0, quarters_ahead=0)


def uses_in(problem: Problem) -> dict[str, list[FragmentUse]]:
    return uses_of(problem, features.scan())


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
    ("trait", "problem", "plan", "holds"),
    [
        ("one_loader", FP8, THREE, True),
        ("one_loader", FP8, PLAN, False),
        ("one_loader", DENSE, THREE, False),
        ("cuts_tiles", FP8, EVEN, True),
        ("cuts_tiles", FP8, THREE, False),
        ("rolls", WINDOW, PLAN, True),
        ("rolls", CAUSAL, PLAN, False),
        ("rolls", WINDOW, TURNS, False),
        ("rolls", WINDOW, with_pipeline(q_in_registers=True), False),
        ("rolls", WINDOW, replace(PLAN, tile=Tile(128, 128)), False),
        ("starts_early", DENSE, PLAN, False),
        ("starts_early", PACKED, PLAN, True),
        ("starts_early", WINDOW, TURNS, True),
        ("starts_early", WINDOW, with_pipeline(TURNS, consumers=3), False),
        ("fills_gaps", PACKED, FEW, True),
        ("fills_gaps", PACKED, PLAN, False),
        ("fills_gaps", replace(PACKED, q_seq="dense"), FEW, False),
    ],
)
def test_trait_holds_where_it_should(trait: str, problem: Problem, plan: Plan, holds: bool) -> None:
    assert getattr(traits, trait)(problem, plan) is holds


@pytest.mark.parametrize(
    ("problem", "plan", "header", "included"),
    [
        (GATHER, ROWS, "mma/store.cuh", True),
        (DENSE, ROWS, "mma/store.cuh", True),
        (replace(DENSE, dtype_o="fp32"), ROWS, "mma/store.cuh", False),
        (DENSE, PLAN, "mma/store.cuh", False),
        (PACKED, PLAN, "ptx/global.cuh", True),
        (DENSE, PLAN, "ptx/global.cuh", False),
        (WIDENED, PLAN, "scale.cuh", True),
        (FP8, EVEN, "scheduler/cut_tiles.cuh", True),
        (DENSE, PLAN, "scale.cuh", False),
    ],
)
def test_headers_are_those_that_the_kernel_needs(
    problem: Problem, plan: Plan, header: str, included: bool
) -> None:
    assert (header in view_constants.headers_of(problem, plan, reads_tile=False)) is included


def test_headers_of_scores_that_read_a_tensor_have_its_tiles() -> None:
    tiles = {"mma/score_tile.cuh"}
    with_tile, without = (view_constants.headers_of(DENSE, PLAN, flag) for flag in (True, False))
    assert {*with_tile} - {*without} == tiles


def test_elements_follow_the_formats() -> None:
    def named(problem: Problem) -> dict[str, str]:
        return {each.name: each.type for each in view_constants.elements_of(problem).named}

    assert named(DENSE) == {"Element": "Bf16", "Output": "Bf16"}
    widened = {"Element": "Fp16", "QElement": "Bf16", "KvElement": "E5m2", "Output": "Bf16"}
    assert named(WIDENED) == widened
    partial = replace(FP8, dtype_kv="e5m2", dtype_o="fp32")
    assert named(partial) == {"Element": "E4m3"}
    elements = view_constants.elements_of(partial)
    assert (elements.kv, elements.box_columns, elements.four_ones) == ("E5m2", 128, "0x3C3C3C3C")


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (replace(DENSE, dtype_o="fp32"), []),
        (DENSE, ["kOBoxColumns", "kOBoxes"]),
        (replace(WIDENED, dtype_o="fp32"), ["kRawColumns", "kRawKBoxes", "kRawVBoxes"]),
        (
            replace(PAGED, dtype_kv="e4m3", dtype_o="fp32"),
            ["kRawColumns", "kRawKBoxes", "kRawVBoxes", "kRawParts"],
        ),
    ],
)
def test_box_constants_are_those_of_output_and_widened_keys(
    problem: Problem, names: list[str]
) -> None:
    assert [each.name for each in view_constants.box_constants(problem)] == names


def test_box_constants_of_an_8_bit_output_have_its_columns() -> None:
    (columns, _) = view_constants.box_constants(replace(FP8, dtype_o="e4m3"))
    assert columns.value == "128"


def test_plan_constants_have_what_the_plan_has() -> None:
    def named(problem: Problem, plan: Plan) -> dict[str, str]:
        return {each.name: each.value for each in view_constants.plan_constants(problem, plan)}

    plain = named(DENSE, PLAN)
    assert (plain["kTileN"], plain["kAhead"], plain["kPairSums"]) == (
        "64",
        "kTileN / 8 * 1",
        "true",
    )
    assert not {"kRawKeys", "kSoftmaxParts", "kPromoteBlocks"} & plain.keys()
    fp8 = named(FP8, THREE)
    assert (fp8["kRawKeys"], fp8["kPromoteBlocks"], fp8["kSoftmaxParts"]) == ("64", "30", "1")
    assert "kPromoteBlocks" not in named(FP8, replace(THREE, promote_blocks=1))


def test_smem_constants_have_the_size_of_a_job_behind_its_place() -> None:
    found = [(each.name, each.value) for each in view_constants.smem_constants(FEW)]
    assert found[1:] == [("kSmemJob", "1024"), ("kJobBytes", "24"), ("kSmemOrder", "1048")]


def test_products_of_16_bits() -> None:
    products = view_constants.products_of(DENSE, PLAN, line_in_products=True)
    assert (products.qk.operands, products.qk.steps) == ("shared_shared", (8,))
    assert products.qk.places == "kKBoxBytes, true, kKGroupBytes"
    assert (products.pv.columns, products.pv.a, products.pv_rest_columns) == (128, "bf16", 0)
    in_registers = with_pipeline(q_in_registers=True)
    products = view_constants.products_of(DENSE, in_registers, line_in_products=False)
    assert products.qk.operands == "register_shared"
    assert products.qk.places == "kKBoxBytes, kKGroupBytes"


def test_products_of_8_bits_sum_stored_weights_where_the_output_is_all() -> None:
    wide = replace(FP8, head_dim_v=192)
    products = view_constants.products_of(wide, PLAN, line_in_products=False)
    assert (products.pv_parts, products.pv.columns, products.pv.sum_registers) == (2, 96, 0)
    assert products.qk.places == "kKeyBoxBytes, false"
    alone = replace(THREE, family="sm90_fwd_alone")
    products = view_constants.products_of(FP8, alone, line_in_products=False)
    assert (products.pv.columns, products.pv.sum_registers) == (136, 4)


@pytest.mark.parametrize(("head_dim_v", "columns", "rest"), [(192, 192, 0), (256, 128, 128)])
def test_products_of_widened_values_have_two_parts_above_192(
    head_dim_v: int, columns: int, rest: int
) -> None:
    problem = replace(WIDENED, head_dim_v=head_dim_v)
    products = view_constants.products_of(problem, PLAN, line_in_products=False)
    assert (products.pv.columns, products.pv_rest_columns) == (columns, rest)
    assert products.pv.a == "f16"


def test_blocks_over_pages_lie_as_their_boxes_do_unless_they_are_widened() -> None:
    assert view_constants.product_block(PAGED, "K").box_bytes == "KBlocks::kBoxBytes"
    widened = replace(PAGED, dtype_kv="e4m3")
    assert view_constants.product_block(widened, "V").box_bytes == "kKeyBoxBytes"
    assert view_loads.v_ring_of(widened).box_bytes == "VBlocks::kBoxBytes"
    assert view_loads.v_ring_of(WIDENED).box_bytes == "kRawKeys * 128"


@pytest.mark.parametrize(
    ("kind", "index", "index_type"),
    [
        ("dense", "job.batch", "int"),
        ("used", "{job.q_length, job.batch}", "SequenceIndex"),
        ("packed", "{job.q_length, job.q_token}", "SequenceIndex"),
    ],
)
def test_side_says_where_a_map_has_a_sequence(kind: Any, index: str, index_type: str) -> None:
    problem = replace(DENSE, q_seq=kind)
    side = view_loads.side_of("q", problem, uses_in(problem)["q_seq"][0])
    assert (side.index, side.index_type) == (index, index_type)
    assert (side.dense, side.packed) == (kind == "dense", kind == "packed")


@pytest.mark.parametrize(
    ("problem", "plan", "fields"),
    [
        (DENSE, PLAN, []),
        (FP8, EVEN, ["first_row", "large_tiles"]),
        (replace(DENSE, q_seq="packed", kv_seq="used"), PLAN, ["q_length", "q_token", "kv_length"]),
        (replace(DENSE, q_seq="used"), FEW, ["q_length", "share", "shares"]),
    ],
)
def test_job_has_members_for_what_varies(problem: Problem, plan: Plan, fields: list[str]) -> None:
    assert list(view_loads.job_fields(problem, plan)) == fields


def test_scheduler_counts_tiles_by_who_draws_them() -> None:
    def tiles(problem: Problem, plan: Plan) -> str:
        scheduler = view_loads.scheduler_of(problem, plan, skips_far_keys=False, bounds_left=False)
        return f"{scheduler.tiles}: {scheduler.row_block}, rows to {scheduler.end_row}"

    assert tiles(DENSE, PLAN) == "p.tiles: tile.row_block, rows to first + kTileM"
    assert tiles(PACKED, PLAN) == "tiles: tile.row_block, rows to first + kTileM"
    assert tiles(FP8, THREE) == "p.tiles: row_block, rows to row_block * 64"
    assert tiles(FP8, EVEN) == "tiles().count(): row_block, rows to cut.end * 64"


def test_scheduler_stops_at_bits_only_beside_a_bound_before_keys() -> None:
    def stops(problem: Problem, bounds_left: bool) -> bool:
        return view_loads.scheduler_of(
            problem, PLAN, skips_far_keys=False, bounds_left=bounds_left
        ).stops_at_bits

    assert stops(MASKED, True)
    assert not stops(MASKED, False)
    assert not stops(WINDOW, True)


@pytest.mark.parametrize(
    ("problem", "plan", "reads_tile", "readers"),
    [
        (DENSE, PLAN, False, "3"),
        (DENSE, PLAN, True, "3 + 31"),
        (GATHER, PLAN, False, "96"),
        (PAGED, PLAN, False, "65"),
        (PACKED, FEW, False, "3 + 31"),
        (WIDENED, PLAN, False, "3 + 128"),
        (FP8, THREE, False, "1 + 96"),
    ],
)
def test_job_is_read_by_loaders_and_who_converts(
    problem: Problem, plan: Plan, reads_tile: bool, readers: str
) -> None:
    assert view_loads.barriers_of(problem, plan, reads_tile).job_readers == readers


@pytest.mark.parametrize(
    ("problem", "plan", "full"),
    [
        (DENSE, PLAN, ["1", "1", "1"]),
        (GATHER, PLAN, ["32", "32", "32"]),
        (WIDENED, PLAN, ["1", "4", "4"]),
        (FP8, PLAN, ["1", "1", "4"]),
        (FP8, THREE, ["1", "1", "3"]),
    ],
)
def test_full_barriers_await_who_brings_an_operand(
    problem: Problem, plan: Plan, full: list[str]
) -> None:
    rings = view_loads.barriers_of(problem, plan, reads_tile=False).operands
    assert [ring.barriers[0].arrivals for ring in rings] == full


def test_barriers_lie_one_behind_the_other() -> None:
    widened = view_loads.barriers_of(WIDENED, PLAN, reads_tile=False)
    places = {each.name: each.value for each in widened.places}
    assert places["kQFull"] == "kSmemBarriers"
    assert places["kKFull"] == "kQEmpty + 8 * kConsumers"
    assert places["kRawKFull"] == "kJobEmpty + 8"
    assert places["kRawVFull"] == "kRawKEmpty + 8 * kRawStages"
    assert len(widened.others) == 1  # both begin in one loop
    paged = view_loads.barriers_of(PAGED, PLAN, reads_tile=True)
    places = {each.name: each.value for each in paged.places}
    assert (places["kVTail"], places["kTileFull"]) == ("kJobEmpty + 8", "kVTail + 8")


@pytest.mark.parametrize(
    ("problem", "plan", "threads"),
    [
        (DENSE, PLAN, ["threadIdx.x == 0", "threadIdx.x == 32", "threadIdx.x == 64"]),
        (GATHER, PLAN, ["threadIdx.x == 0", "warp == 1", "warp == 2"]),
        (PACKED, FEW, ["threadIdx.x == 0", "warp == 1", "threadIdx.x == 64"]),
        (PAGED, PLAN, ["threadIdx.x == 0", "threadIdx.x == 32", "warp == 2"]),
        (FP8, THREE, []),
    ],
)
def test_producers_are_threads_or_warps(problem: Problem, plan: Plan, threads: list[str]) -> None:
    roles = view_loads.producers_of(problem, plan, uses_in(problem), reads_tile=False)
    assert [role.threads for role in roles][:3] == threads


def test_producers_order_few_sequences_in_shared_memory() -> None:
    def order(problem: Problem, plan: Plan) -> str:
        roles = view_loads.producers_of(problem, plan, uses_in(problem), reads_tile=False)
        return next(iter(roles)).arguments

    assert order(DENSE, PLAN) == "smem, slot"
    assert order(PACKED, PLAN) == "smem, slot, find_order(p)"
    assert order(PACKED, FEW) == "smem, slot, find_order(p, shared)"


def test_converter_has_a_warpgroup_unless_one_thread_loads() -> None:
    found = [view_loads.converter_of(problem, PLAN) for problem in (DENSE, FP8, WIDENED)]
    assert found == ["", "VTransposer", "Widener"]
    assert view_loads.converter_of(FP8, THREE) == ""


def test_maps_are_those_of_tensors_that_the_copy_engine_moves() -> None:
    assert view_loads.mapped_tensors(DENSE, PLAN) == ("q", "k", "v", "o")
    assert view_loads.mapped_tensors(DENSE, ROWS) == ("q", "k", "v")
    assert view_loads.mapped_tensors(GATHER, ROWS) == ()


def test_query_axis_is_there_where_lengths_vary() -> None:
    assert query_axis(DENSE, FEW) is None
    axis = query_axis(PACKED, FEW)
    assert axis is not None
    assert (axis.rows, axis.tail_share, axis.orders_few) == (128, 4, True)


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
