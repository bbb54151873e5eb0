"""The view of a forward kernel, constants and loads: decisions, where they tell kernels apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attngen.kernels.base import Tile
from attngen.kernels.wgmma.forward import traits, view_barriers, view_constants, view_loads
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.kernels.wgmma.forward.view import query_axis
from attngen.spec.problem import Problem
from tests.support.forward_kit import (
    CAUSAL,
    DENSE,
    EVEN,
    FEW,
    FP8,
    GATHER,
    MASKED,
    PACKED,
    PAGED,
    PLAN,
    ROWS,
    THREE,
    TURNS,
    WIDENED,
    WINDOW,
    uses_in,
    with_pipeline,
)


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
    assert view_loads.v_ring_of(widened, PLAN).box_bytes == "VBlocks::kBoxBytes"
    assert view_loads.v_ring_of(WIDENED, PLAN).box_bytes == "kRawKeys * 128"


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
    assert view_barriers.barriers_of(problem, plan, reads_tile).job_readers == readers


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
    rings = view_barriers.barriers_of(problem, plan, reads_tile=False).operands
    assert [ring.barriers[0].arrivals for ring in rings] == full


def test_barriers_lie_one_behind_the_other() -> None:
    widened = view_barriers.barriers_of(WIDENED, PLAN, reads_tile=False)
    places = {each.name: each.value for each in widened.places}
    assert places["kQFull"] == "kSmemBarriers"
    assert places["kKFull"] == "kQEmpty + 8 * kConsumers"
    assert places["kRawKFull"] == "kJobEmpty + 8"
    assert places["kRawVFull"] == "kRawKEmpty + 8 * kRawStages"
    assert len(widened.others) == 1  # both begin in one loop
    paged = view_barriers.barriers_of(PAGED, PLAN, reads_tile=True)
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
