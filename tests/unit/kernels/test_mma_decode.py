"""Split keys by products of warps: plans for each chip, refusals, views, and what compiles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.errors import PlanError
from attngen.fragments import features
from attngen.kernels.base import Tile
from attngen.kernels.mma_sync.decode import plan as decode
from attngen.kernels.mma_sync.decode import view
from attngen.kernels.mma_sync.decode.plan import DECODE, DecodePlan
from attngen.kernels.plan import plans
from attngen.kernels.support.combine import CombinePlan
from attngen.kernels.uses import uses_of
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT, TARGETS
from tests.support.forward_kit import BIAS, CAPPED, CAUSAL, DENSE, FP8, PAGED, WIDENED
from tests.support.sass import count_instructions

CHIPS = [name for name, target in TARGETS.items() if "wgmma" not in target.instructions]
SPLIT = replace(DENSE, decode=True)
PAGES = replace(PAGED, kv_seq="used", decode=True)


def plan_of(problem: Problem, arch: str) -> DecodePlan:
    found, _ = plans(problem, arch)
    assert isinstance(found, DecodePlan)
    return found


@pytest.mark.parametrize("arch", CHIPS)
def test_every_head_dim_has_a_plan_on_every_chip(arch: str) -> None:
    target = TARGETS[arch]
    for d in range(8, 257, 8):
        for d_v in {8, d, 256}:
            plan = plan_of(replace(SPLIT, head_dim_qk=d, head_dim_v=d_v), arch)
            assert plan.arch == arch and plan.smem_bytes <= target.smem_share(plan.ctas)
            assert plan.stages >= 2 and plan.tile.n == plan.warps * plan.warp_keys


@pytest.mark.parametrize(
    ("arch", "d", "ctas", "keys", "stages"),
    [("sm_80", 128, 1, 16, 4), ("sm_90", 128, 2, 16, 3), ("sm_90", 64, 4, 16, 3)],
)
def test_buffers_follow_from_the_chips_memory(
    arch: str, d: int, ctas: int, keys: int, stages: int
) -> None:
    plan = plan_of(replace(SPLIT, head_dim_qk=d, head_dim_v=d), arch)
    assert (plan.ctas, plan.warp_keys, plan.stages) == (ctas, keys, stages)
    assert plan.busy_ctas == (0.735 if ctas == 4 else 0.9) * ctas


def test_sums_of_all_warps_fit_into_the_place_of_keys_and_values() -> None:
    for d, kv in itertools.product(range(16, 257, 16), ("bf16", "e4m3")):
        plan = plan_of(replace(SPLIT, head_dim_qk=16, head_dim_v=d, dtype_kv=kv), "sm_89")
        sizes = {region.name: region.bytes for region in plan.smem}
        assert plan.warps * 64 * d <= sizes["K"] + sizes["V"]


def test_what_it_does_not_serve_is_refused_by_name() -> None:
    for problem, word in (
        (replace(FP8, decode=True), "queries of 8 bits"),
        (replace(WIDENED, decode=True), "sm_80 converts nothing from e5m2"),
        (replace(BIAS, decode=True), "all of this together"),
    ):
        with pytest.raises(PlanError, match=word):
            plans(problem, "sm_80")
    with pytest.raises(PlanError) as caught:
        plans(replace(WIDENED, decode=True), "sm_80")
    assert "wgmma" not in str(caught.value)  # what other families need says nothing here


@pytest.mark.parametrize(
    ("arch", "dims", "ctas", "warps", "keys", "row_tiles"),
    [
        ("sm_80", (576, 512), 1, 8, 8, 1),
        ("sm_80", (320, 320), 1, 8, 32, 4),
        ("sm_80", (512, 448), 1, 8, 16, 2),
        ("sm_89", (576, 512), 1, 4, 8, 1),
        ("sm_120", (512, 256), 1, 4, 8, 1),
        ("sm_90", (320, 264), 2, 4, 16, 1),
        ("sm_90", (576, 512), 1, 8, 32, 4),
    ],
)
def test_warps_divide_columns_where_none_holds_all(
    arch: str, dims: tuple[int, int], ctas: int, warps: int, keys: int, row_tiles: int
) -> None:
    d, d_v = dims
    plan = plan_of(replace(SPLIT, head_dim_qk=d, head_dim_v=d_v), arch)
    assert plan.divides_columns and plan.stages == 1
    assert (plan.ctas, plan.warps, plan.warp_keys, plan.row_tiles) == (ctas, warps, keys, row_tiles)
    assert plan.tile == Tile(16 * row_tiles, plan.row_warps * keys) and plan.tile.n <= 64
    sizes = {x.name: x.bytes for x in plan.smem}
    assert sizes["Weights"] == 16 * 128 * row_tiles and sizes["Sums"] >= 64 * warps
    assert not plan_of(SPLIT, arch).divides_columns


def test_a_target_with_larger_products_has_none_of_these_kernels() -> None:
    assert all(each.family != DECODE for each in plans(SPLIT, DEFAULT.name))


@pytest.mark.parametrize(
    ("problem", "arch", "field", "value"),
    [
        (SPLIT, "sm_80", "starts_next", False),
        (SPLIT, "sm_120", "starts_next", True),
        (SPLIT, "sm_89", "weight_element", "Element"),
        (replace(WIDENED, decode=True), "sm_89", "weight_element", "Fp16"),
        (replace(WIDENED, decode=True), "sm_89", "element_bytes", 1),
        (SPLIT, "sm_80", "last_box_may_miss", False),
        (replace(SPLIT, head_dim_v=80), "sm_80", "last_box_may_miss", True),
        (replace(SPLIT, max_logit=True), "sm_80", "max_logit", True),
        (replace(PAGES, q_seq="packed"), "sm_80", "packed", True),
        (replace(PAGES, q_seq="used"), "sm_80", "ragged", True),
    ],
)
def test_views_decide(problem: Problem, arch: str, field: str, value: object) -> None:
    plan, known = plan_of(problem, arch), features.scan()
    kernel = render_problem(problem, plan).kernel
    made = view.decode_view(problem, plan, kernel, uses_of(problem, known), ())
    assert getattr(made, field) == value


def test_the_kernel_that_joins_awaits_the_other_where_it_may_start_early() -> None:
    for arch, early in (("sm_80", False), ("sm_120", True), (DEFAULT.name, True)):
        *_, joins = plans(SPLIT, arch)
        assert isinstance(joins, CombinePlan)
        source = render_problem(SPLIT, joins)
        assert source.kernel.dependent == early == ("await_dependency();" in source.text)


def test_registers_count_output_queries_and_scores() -> None:
    assert decode.operand_registers(SPLIT, 16) == 64 + 32 + 8
    assert decode.operand_registers(replace(SPLIT, head_dim_qk=256), 16) == 64 + 4 + 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        ("sm_80", replace(CAUSAL, decode=True)),
        ("sm_86", replace(CAPPED, decode=True, kv_seq="used", max_logit=True)),
        ("sm_89", replace(PAGES, dtype_kv="e4m3")),
        ("sm_120", replace(PAGES, q_seq="packed", head_dim_qk=64, head_dim_v=64)),
        ("sm_89", replace(WIDENED, decode=True, head_dim_qk=576, head_dim_v=512)),
    ],
)
def test_kernels_compile_for_every_chip(arch: str, problem: Problem) -> None:
    binary, cubin = compile_source(render_problem(problem, plan_of(problem, arch)), problem, arch)
    assert not binary.resources.spill_bytes
    found = count_instructions(cubin)
    assert found["HMMA"] > 10 and found["LDGSTS"] > 5


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
@pytest.mark.parametrize("dims", [(576, 512), (64, 448), (304, 272)], ids=str)
def test_bytes_of_more_columns_than_a_warp_holds_are_widened_in_pairs_of_steps(
    arch: str, dims: tuple[int, int]
) -> None:
    d, d_v = dims
    problem = replace(WIDENED, decode=True, head_dim_qk=d, head_dim_v=d_v)
    plan = plan_of(problem, arch)
    assert plan.divides_columns and plan.warp_keys % 16 == 0
    text = render_problem(problem, plan).text
    assert "constexpr int kColumns = ceil_div(ceil_div(kVSteps, 2), kRowWarps) * 32;" in text
    assert "order_columns(output);" in text and "pack_pairs<Fp16, kKeys / 2>" in text
    plain = render_problem(
        replace(SPLIT, head_dim_qk=d, head_dim_v=d_v),
        plan_of(replace(SPLIT, head_dim_qk=d, head_dim_v=d_v), arch),
    ).text
    assert "order_columns" not in plain and "ceil_div(kVSteps, kRowWarps) * 16" in plain
