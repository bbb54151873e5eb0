"""The forward by products of warps: plans for each chip, refusals, views, and what compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.errors import PlanError
from attngen.fragments import features
from attngen.kernels.mma_sync.forward import choices, view
from attngen.kernels.mma_sync.forward.plan import FORWARD, Plan
from attngen.kernels.plan import candidates, plans
from attngen.kernels.uses import uses_of
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT, TARGETS
from tests.support.forward_kit import (
    BIAS,
    CAUSAL,
    DENSE,
    FP8,
    GATHER,
    MASKED,
    PACKED,
    PAGED,
    WIDENED,
)
from tests.support.sass import count_instructions

CHIPS = [name for name, target in TARGETS.items() if "wgmma" not in target.instructions]
SCALED = replace(FP8, scores=("token_scales",))
MOST_SPILLS = 160  # bytes, of loaders' addresses, beside hundreds of products a block


def plan_of(problem: Problem, arch: str) -> Plan:
    *_, found = plans(problem, arch)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("arch", CHIPS)
def test_every_head_dim_has_a_plan_on_every_chip(arch: str) -> None:
    target = TARGETS[arch]
    for d in range(8, 257, 8):
        for d_v in {8, d, 256}:
            plan = plan_of(replace(DENSE, head_dim_qk=d, head_dim_v=d_v), arch)
            assert plan.arch == arch and plan.smem_bytes <= target.smem_share(plan.ctas)
            assert plan.tile.m == plan.warps * plan.row_tiles * 16 and plan.tile.n % 16 == 0


@pytest.mark.parametrize(
    ("arch", "d", "rows", "keys", "stages", "ctas"),
    [
        ("sm_80", 64, 128, 96, 2, 2),
        ("sm_86", 64, 128, 64, 2, 2),
        ("sm_80", 128, 128, 64, 1, 2),
        ("sm_89", 128, 128, 32, 1, 2),
        ("sm_120", 128, 128, 32, 1, 2),
        ("sm_90", 128, 128, 64, 1, 2),
        ("sm_80", 256, 128, 64, 1, 1),
    ],
)
def test_tiles_follow_from_the_chips_memory(
    arch: str, d: int, rows: int, keys: int, stages: int, ctas: int
) -> None:
    plan = plan_of(replace(CAUSAL, head_dim_qk=d, head_dim_v=d), arch)
    found = plan.tile.m, plan.tile.n, plan.stages, plan.ctas
    assert found == (rows, keys, stages, ctas) and plan.schedule.longest_first


def test_candidates_are_all_that_fit_the_preferred_first() -> None:
    found = candidates(DENSE, "sm_86")
    assert len(found) > 2 and found[0] == plan_of(DENSE, "sm_86")
    assert not any(x.tile.n == 64 and x.tile.m == 128 and x.ctas == 2 for x in found)


def test_what_it_does_not_serve_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="sm_80 has no products of 8 bits"):
        plans(FP8, "sm_80")
    with pytest.raises(PlanError, match="sm_80 converts nothing from e5m2"):
        plans(WIDENED, "sm_80")
    with pytest.raises(PlanError, match="no kernel does all of this together yet"):
        plans(replace(WIDENED, dropout=True), "sm_89")
    with pytest.raises(PlanError, match="mma.sync have no mask that was made before, beside"):
        plans(replace(FP8, attn_mask=True, kv_iter="listed"), "sm_89")


def test_scales_of_tokens_leave_registers_for_smaller_blocks() -> None:
    """Each warp has room for those of a block, and raises rows one by one."""
    for d in (64, 128, 256):
        problem = replace(SCALED, head_dim_qk=d, head_dim_v=d)
        plan = plan_of(problem, "sm_89")
        (room,) = [region.bytes for region in plan.smem if region.name == "Scales"]
        assert plan.tile.n == choices.SCALED_BLOCK and room == 12 * plan.warps * plan.tile.n
        text = render_problem(problem, plan).text
        assert "raise_rows(soft[m]" in text and "p.descale_v_stride_row" in text
        assert "descale_q_stride_batch + kv_head" not in text
    assert not any(region.name == "Scales" for region in plan_of(FP8, "sm_89").smem)


def test_operands_of_8_bits_have_boxes_of_twice_as_many_columns() -> None:
    plan, narrow = plan_of(DENSE, "sm_89"), plan_of(FP8, "sm_89")
    sizes = {region.name: region.bytes for region in narrow.smem}
    assert sizes["K"] == 128 * narrow.tile.n * narrow.stages and narrow.tile.n % 32 == 0
    assert narrow.atoms - plan.atoms == {"cute/arch/mma_sm89.hpp"}
    text = render_problem(FP8, narrow).text
    assert "multiply_add<QElement, KvElement>" in text and "p.amax_o" in text


def test_keys_and_values_of_8_bits_take_half_the_memory_beside_queries_of_16() -> None:
    plan, narrow = plan_of(DENSE, "sm_89"), plan_of(WIDENED, "sm_89")
    wide, half = ({x.name: x.bytes for x in each.smem} for each in (plan, narrow))
    assert half["Q"] == wide["Q"] == 256 * plan.tile.m
    assert half["K"] == half["V"] == 128 * narrow.tile.n * narrow.stages
    assert narrow.tile.n > plan.tile.n and narrow.atoms == plan.atoms
    text = render_problem(WIDENED, narrow).text
    assert "warp.order_queries(smem)" in text and "pack_pairs<Fp16, 8>" in text
    assert "p.descale_v" in text and "p.amax_o" not in text and "p.descale_q" not in text


def test_a_target_with_larger_products_has_none_of_these_kernels() -> None:
    assert all(each.family != FORWARD for each in plans(DENSE, DEFAULT.name))
    with pytest.raises(PlanError) as caught:
        plans(replace(BIAS, decode=True), DEFAULT.name)
    assert "mma" not in str(caught.value)


def test_packed_lengths_need_no_kernel_before() -> None:
    assert [each.family for each in plans(PACKED, "sm_80")] == [FORWARD]
    assert [each.family for each in plans(MASKED, "sm_80")] == ["mask_pack", FORWARD]


@pytest.mark.parametrize(
    ("problem", "field", "value"),
    [
        (DENSE, "varlen", False),
        (PACKED, "packed", True),
        (PACKED, "fills_gaps", True),
        (MASKED, "stops_at_bits", False),
        (replace(MASKED, masks=("window",)), "stops_at_bits", True),
        (CAUSAL, "longest_first", "true"),
        (DENSE, "longest_first", "false"),
        (DENSE, "one_stage", True),
        (replace(DENSE, head_dim_qk=64, head_dim_v=64), "one_stage", False),
        (DENSE, "tells_full_blocks", "true"),
        (GATHER, "tells_full_blocks", "false"),
        (BIAS, "score_tile", "bias"),
        (DENSE, "score_tile", None),
        (DENSE, "narrow", False),
    ],
)
def test_views_decide(problem: Problem, field: str, value: object) -> None:
    plan, known = plan_of(problem, "sm_80"), features.scan()
    kernel = render_problem(problem, plan).kernel
    made = view.forward_view(problem, plan, uses_of(problem, known), kernel, ())
    assert getattr(made, field) == value


@pytest.mark.parametrize(
    ("problem", "finder"),
    [(DENSE, "head_rows"), (GATHER, "gathered_rows"), (PAGED, "paged_rows")],
)
def test_rows_are_found_where_they_lie(problem: Problem, finder: str) -> None:
    uses = uses_of(problem, features.scan())
    q, k, v = (view.operand_of(problem, name, uses) for name in "qkv")
    assert k.finder == v.finder == finder and (k.fetch is not None) == problem.paged
    assert q.finder == ("head_rows" if problem.paged else finder)


def test_weights_say_how_scores_become_them() -> None:
    uses = uses_of(replace(DENSE, scores=("softcap",)), features.scan())["score"]
    capped = view.weights_of(replace(DENSE, dropout=True), uses, scaled=False)
    assert capped.small and capped.pack == "pack_positive_pairs"
    assert "keep_scale" in capped.keep_factor
    plain = view.weights_of(DENSE, [], scaled=True)
    assert plain.unit == "kLog2E" and plain.row_maximum == "state[m].row_max[half]"
    assert not plain.small and plain.keep_factor == ""


def test_registers_count_output_scores_and_weights() -> None:
    choice = choices.Choice(4, 2, 64, 1, 2)
    assert choices.operand_registers(DENSE, choice) == 2 * (64 + 32 + 4)
    assert choice.registers == 255 and choices.Choice(4, 2, 64, 1, 3).registers == 168


def test_gathered_rows_beside_dropout_take_the_next_smaller_block() -> None:
    for d, keys in ((128, 32), (64, 64)):
        wide = replace(GATHER, head_dim_qk=d, head_dim_v=d)
        assert plan_of(replace(wide, dropout=True), "sm_80").tile.n == keys
        assert plan_of(wide, "sm_80").tile.n > keys


# Each chip once, with other problems, so that few kernels are compiled.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        ("sm_80", CAUSAL),
        ("sm_86", replace(CAUSAL, dropout=True, dtype_q="fp16", dtype_kv="fp16", dtype_o="fp16")),
        ("sm_87", replace(PAGED, q_seq="packed", kv_seq="used")),
        ("sm_89", replace(PACKED, head_dim_qk=96, head_dim_v=96, scores=BIAS.scores)),
        ("sm_120", replace(MASKED, head_dim_qk=64, head_dim_v=64, max_logit=True)),
        ("sm_90", replace(CAUSAL, head_dim_qk=256, head_dim_v=256, scores=("softcap", "alibi"))),
        ("sm_89", replace(FP8, masks=("causal",), dropout=True)),
        ("sm_120", replace(FP8, q_seq="packed", kv_seq="packed", head_dim_v=64, dtype_o="e4m3")),
        ("sm_89", replace(WIDENED, kv_fetch="page_tma", kv_seq="used", masks=("causal",))),
        ("sm_120", replace(SCALED, q_seq="packed", kv_seq="packed", masks=("causal",))),
    ],
)
def test_kernels_compile_for_every_chip(arch: str, problem: Problem) -> None:
    plan = plan_of(problem, arch)
    binary, cubin = compile_source(render_problem(problem, plan), problem, arch)
    assert binary.arch == arch and binary.resources.spill_bytes <= MOST_SPILLS
    found = count_instructions(cubin)
    products = "QMMA" if problem.eight_bit else "HMMA"
    assert found[products] > 50 and found["LDGSTS"] > 5 and not found["HGMMA"]
