"""Plans: every one of every head-dim pair fits the chip, by arithmetic written down again here."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from attngen.errors import PlanError
from attngen.kernels.base import lay_out
from attngen.kernels.plan import candidates, plan
from attngen.kernels.plan import plans as plans_of
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.spec.problem import Problem

ARCH = "sm_90a"
SMEM_BYTES = 227 * 1024  # a CTA may use, of the SM's 228 KB
REGISTER_FILE = 65536  # registers an SM
DIMS = range(8, 257, 8)
CASES = [
    *itertools.product(((), ("causal",), ("window",), ("causal", "window")), ("bf16",), (None,)),
    ((), "fp16", None),
    ((), "bf16", "fp32"),
    (("causal",), "fp16", "fp32"),
]
EACH_CASE = pytest.mark.parametrize(
    ("masks", "dtype", "out"),
    CASES,
    ids=["+".join((*masks, dtype, *([out] if out else []))) for masks, dtype, out in CASES],
)


def up(value: int, step: int) -> int:
    return -(-value // step) * step


def expected_bytes(problem: Problem, chosen: Plan) -> dict[str, int]:
    """Sizes of shared memory by name; rows of head dims take whole boxes of 64 elements."""
    m, n, pipeline = chosen.tile.m, chosen.tile.n, chosen.pipeline
    qk_bytes, v_bytes = up(problem.head_dim_qk, 64) * 2, up(problem.head_dim_v, 64) * 2
    k_bytes, v_total = pipeline.k_stages * n * qk_bytes, pipeline.v_stages * n * v_bytes
    sizes = {"Q": m * qk_bytes, "K": k_bytes, "V": v_total}
    if problem.dtype_o != "fp32" and not (pipeline.output_over_q or chosen.stores_rows):
        sizes["O"] = m * v_bytes
    # Full and empty: Q of each consumer, K and V of each stage, and the job slot.
    barriers = 2 * (pipeline.consumers + pipeline.k_stages + pipeline.v_stages + 1)
    return {**sizes, "Barriers": 8 * barriers, "Job": 6 * 4}


def check_memory(problem: Problem, chosen: Plan) -> None:
    regions = chosen.smem
    assert {region.name: region.bytes for region in regions} == expected_bytes(problem, chosen)
    assert all(region.offset % 1024 == 0 for region in regions)
    ordered = sorted(regions, key=lambda region: region.offset)
    for region, following in itertools.pairwise(ordered):
        assert region.offset + region.bytes <= following.offset
    assert chosen.smem_bytes == ordered[-1].offset + ordered[-1].bytes <= SMEM_BYTES
    if chosen.pipeline.output_over_q:
        assert problem.dtype_o != "fp32"
        assert up(problem.head_dim_v, 64) <= up(problem.head_dim_qk, 64)


def check_registers(problem: Problem, chosen: Plan) -> None:
    """setmaxnreg only moves registers that the launch holds, in steps of 8 from 24 to 240."""
    pipeline = chosen.pipeline
    warpgroups = pipeline.consumers + 1
    assert chosen.threads == 128 * warpgroups
    at_launch = REGISTER_FILE // chosen.threads // 8 * 8
    pool = at_launch * warpgroups
    assert pool == {3: 504, 4: 512, 5: 480}[warpgroups]
    taken = pipeline.producer_registers + pipeline.consumers * pipeline.consumer_registers
    assert taken <= pool
    for count in (pipeline.producer_registers, pipeline.consumer_registers):
        assert count % 8 == 0 and 24 <= count <= 240
    assert pipeline.producer_registers <= at_launch <= pipeline.consumer_registers
    # float32 output and scores, 16-bit weights two in a register; what is left: addresses, rows.
    live = problem.head_dim_v * 64 // 128 + chosen.tile.n * 64 // 128 + chosen.tile.n * 64 // 256
    if pipeline.q_in_registers:  # whole steps of 16 elements, two in a register
        live += up(problem.head_dim_qk, 16) * 64 // 256
    assert chosen.operand_registers == live <= pipeline.consumer_registers - 24


def check_tile(chosen: Plan) -> None:
    """64 rows a warpgroup; blocks are whole steps of wgmma's 16, at most one box of 256 rows."""
    assert chosen.tile.m == 64 * chosen.pipeline.consumers
    assert chosen.tile.n % 16 == 0 and 16 <= chosen.tile.n <= 256
    assert min(chosen.pipeline.k_stages, chosen.pipeline.v_stages) >= 2
    assert chosen.arch == ARCH and chosen.family == "sm90_fwd"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(4))
@EACH_CASE
def test_candidates_every_head_dim_pair_has_plans_that_fit(
    masks, dtype, out, part: int, make_problem
) -> None:
    for head_dim, head_dim_v in [*itertools.product(DIMS, DIMS)][part::4]:
        problem = make_problem(head_dim, head_dim_v, masks, dtype, out)
        found = candidates(problem, ARCH)
        assert found and len(set(found)) == len(found)
        assert plan(problem, ARCH) == found[0]
        for chosen in found:
            check_memory(problem, chosen)
            check_registers(problem, chosen)
            check_tile(chosen)


@EACH_CASE
def test_candidates_dynamic_schedule_is_for_unequal_tiles(masks, dtype, out, make_problem) -> None:
    for head_dim in DIMS:
        for chosen in candidates(make_problem(head_dim, None, masks, dtype, out), ARCH):
            assert chosen.schedule.longest_first == bool(masks)
            assert chosen.schedule.dynamic or not masks
            assert chosen.schedule.kv_group_bytes >= 0


def test_candidates_checks_of_this_file_notice_a_plan_that_does_not_fit(make_problem) -> None:
    problem = make_problem(128)
    good = plan(problem, ARCH)
    pipeline, q = good.pipeline, good.smem[0]
    wrong_memory = [
        replace(good, smem=(replace(q, bytes=q.bytes - 1), *good.smem[1:])),
        replace(good, smem=(replace(q, offset=512), *good.smem[1:])),
        replace(good, smem=(replace(q, offset=1024), *good.smem[1:])),
        replace(good, smem_bytes=good.smem_bytes - 1),
    ]
    wrong_registers = [
        replace(good, pipeline=replace(pipeline, consumer_registers=248)),
        replace(good, pipeline=replace(pipeline, producer_registers=48, consumer_registers=232)),
        replace(good, threads=256),
        replace(good, operand_registers=good.operand_registers + 1),
    ]
    for check, plans in ((check_memory, wrong_memory), (check_registers, wrong_registers)):
        for chosen in plans:
            with pytest.raises((AssertionError, KeyError)):
                check(problem, chosen)


def test_plan_no_tile_that_fits_is_refused_by_problem_and_arch(make_problem) -> None:
    with pytest.raises(PlanError, match="full_d1024_bf16.*sm_90a"):
        plan(make_problem(1024), ARCH)


BESIDE = {
    "scores": {"scores": ("softcap",)},
    "sink": {"softmax": "off_by_one"},
    "maximum": {"max_logit": True},
    "dropout": {"dropout": True},
    "positions": {"positions": True},
    "bits": {"attn_mask": True},
    "packed": {"q_seq": "packed", "kv_seq": "packed"},
    "decode": {"decode": True},
}


@pytest.mark.parametrize("pair", [*itertools.combinations(BESIDE, 2)], ids="-".join)
def test_plan_what_templates_do_not_have_together_is_refused(pair, make_problem) -> None:
    """A problem out of a trace has passed no `resolve`, and a template would leave a part out."""
    problem = replace(make_problem(64), **BESIDE[pair[0]], **BESIDE[pair[1]])
    if "decode" not in pair or {*pair} & {"scores", "sink", "maximum"}:
        assert plans_of(problem, "sm_90a")
    elif "packed" not in pair:
        with pytest.raises(PlanError, match="together"):
            plans_of(problem, "sm_90a")


def test_plan_8_bits_beside_what_their_kernels_leave_out_is_refused(make_problem) -> None:
    problem = make_problem(64, dtype="e4m3", out="bf16")
    assert plans_of(replace(problem, **BESIDE["bits"]), "sm_90a")
    problem = replace(problem, **BESIDE["positions"])
    with pytest.raises(PlanError, match="together"):
        plans_of(problem, "sm_90a")


def test_plan_unknown_architecture_is_refused_with_those_there_are(make_problem) -> None:
    with pytest.raises(PlanError, match="sm_75.*sm_90a"):
        plan(make_problem(64), "sm_75")


@pytest.mark.parametrize("lengths", [{"q_seq": "packed", "kv_seq": "packed"}, {"q_seq": "used"}])
@pytest.mark.parametrize("scores", [(), ("softcap",), ("alibi",), ("softcap", "alibi")], ids=str)
def test_plan_window_beside_lengths_has_the_warpgroups_of_equal_ones(
    lengths, scores, make_problem
) -> None:
    for d in DIMS:
        problem = replace(make_problem(d, masks=("causal", "window")), scores=scores)
        dense, varying = (plan(each, ARCH) for each in (problem, replace(problem, **lengths)))
        # Up to 64 columns a softcap leaves four warpgroups no registers, and windows nothing own.
        if d > 64 or "softcap" not in scores:
            assert (varying.tile, varying.pipeline) == (dense.tile, dense.pipeline), d
            assert (varying.tile.n, varying.pipeline.take_turns) == (64, False)


def test_plan_says_why(make_problem) -> None:
    chosen = plan(make_problem(128, masks=("causal",)), ARCH)
    assert any(str(chosen.smem_bytes) in line for line in chosen.why)
    assert any(str(chosen.operand_registers) in line for line in chosen.why)


def test_lay_out_regions_follow_one_another_aligned() -> None:
    regions = lay_out({"A": 1, "B": 1024, "C": 1025, "D": 8})
    assert [(region.name, region.offset, region.bytes) for region in regions] == [
        ("A", 0, 1),
        ("B", 1024, 1024),
        ("C", 2048, 1025),
        ("D", 4096, 8),
    ]
