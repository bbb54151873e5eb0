"""The backward by products of warps: plans for each chip, refusals, views, and what compiles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.errors import PlanError
from attngen.kernels import selection
from attngen.kernels.mma_sync.backward import choices, view
from attngen.kernels.mma_sync.backward.plan import BACKWARD, Plan
from attngen.kernels.plan import plans
from attngen.runtime.program_check import mistakes_of
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT, TARGETS
from tests.support.backward_kit import (
    BIAS,
    CAUSAL,
    DENSE,
    DROPOUT,
    GATHER,
    LARGE,
    MASKED,
    ORDERED,
    PACKED,
    SMALL,
)
from tests.support.sass import count_instructions

CHIPS = [name for name, target in TARGETS.items() if "wgmma" not in target.instructions]
MOST_SPILLS = 160  # bytes
FP8 = replace(DENSE, dtype_q="e4m3", dtype_kv="e4m3")


def plan_of(problem: Problem, arch: str) -> Plan:
    (found,) = (each for each in plans(problem, arch) if each.family == BACKWARD)
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("arch", CHIPS)
def test_every_head_dim_has_a_plan_on_every_chip(arch: str) -> None:
    target = TARGETS[arch]
    for d in range(8, 257, 8):
        for d_v in {8, d, 256}:
            plan = plan_of(replace(ORDERED, head_dim_qk=d, head_dim_v=d_v), arch)
            assert plan.arch == arch and plan.smem_bytes <= target.smem_share(plan.ctas)
            assert plan.threads == 32 * plan.key_warps * plan.query_warps


@pytest.mark.parametrize(
    ("problem", "arch", "keys", "warps", "stages", "ctas"),
    [
        (SMALL, "sm_80", 128, 4, 2, 2),
        (SMALL, "sm_89", 128, 8, 2, 1),
        (DENSE, "sm_80", 128, 8, 2, 1),
        (DENSE, "sm_86", 64, 8, 1, 1),
        (DENSE, "sm_90", 128, 8, 2, 1),
        (LARGE, "sm_80", 64, 8, 1, 1),
        (LARGE, "sm_120", 32, 4, 1, 1),
    ],
)
def test_tiles_follow_from_the_chips_memory(
    problem: Problem, arch: str, keys: int, warps: int, stages: int, ctas: int
) -> None:
    plan = plan_of(problem, arch)
    found = plan.tile.n, plan.key_warps * plan.query_warps, plan.stages, plan.ctas
    assert found == (keys, warps, stages, ctas)


def test_warps_that_have_all_queries_of_their_keys_keep_weights() -> None:
    biased = replace(SMALL, scores=BIAS.scores)
    for problem, keeps in ((SMALL, True), (DENSE, False), (biased, False)):
        plan = plan_of(problem, "sm_90")
        regions = {each.name: each.bytes for each in plan.smem}
        assert plan.keeps_weights == keeps and ("P" in regions) != keeps
        assert plan.late_dq == (regions["Ds"] == 2 * 128 * plan.tile.n)


def test_blocks_in_an_order_are_those_of_the_workspaces() -> None:
    few = choices.Choice(2, 2, 32, 32, 1, 1)
    target = TARGETS["sm_86"]
    assert choices.make_plan(DENSE, few, target) and not choices.make_plan(ORDERED, few, target)


def test_what_it_does_not_serve_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="operands of 8 bits"):
        plans(FP8, "sm_80")


def test_a_target_with_larger_products_has_none_of_these_kernels() -> None:
    assert all(each.family != BACKWARD for each in plans(DENSE, DEFAULT.name))


def test_kernels_around_clear_and_round_the_sums() -> None:
    names = ["bwd_clear", "mma_bwd", "bwd_convert"]
    assert [each.family for each in plans(PACKED, "sm_80")] == names
    assert [each.family for each in plans(MASKED, "sm_80")] == [names[0], "mask_pack", *names[1:]]
    around = ["bwd_clear", "bwd_row_sums", "mma_bwd", "bwd_convert", "mma_bwd_dbias"]
    assert [each.family for each in plans(BIAS, "sm_80")] == around
    texts = {each.family: render_problem(DENSE, each).text for each in plans(DENSE, "sm_80")}
    assert "sums_of_dq" in texts["bwd_clear"] and "allow_dependents" not in texts["bwd_clear"]
    assert "gather_planes" in texts["bwd_convert"] and "turns" not in texts["bwd_convert"]


@pytest.mark.parametrize(
    ("problem", "name", "store"),
    [
        (DENSE, "dk", "store_whole_rows<Element, 64>"),
        (replace(DENSE, head_dim_v=40), "dv", "store_rows<Element, 32>"),
        (GATHER, "dv", "store_rows<Element, 64>"),
        (replace(DENSE, dtype_grad="fp32"), "dk", "store_float_rows<64>"),
        (replace(GATHER, dtype_grad="fp32"), "dv", "store_float_rows<64>"),
    ],
)
def test_gradients_are_stored_as_their_columns_lie(
    problem: Problem, name: str, store: str
) -> None:
    made = view.gradient_of(problem, plan_of(problem, "sm_80"), name, "share")
    assert made.store == store and bool(made.left) == ("whole" not in store)
    assert ("p.scale" in made.factor) == (name == "dk")
    assert (made.left == "p.dim_v") == problem.gather  # columns that are not there have no place


def test_gaps_are_of_axes_whose_lengths_vary() -> None:
    assert view.gaps_of(DENSE) == ()
    (of_keys,) = view.gaps_of(replace(DENSE, kv_seq="used"))
    assert [each.name for each in of_keys.tensors] == ["dk", "dv"] and not of_keys.optional
    of_queries, _ = view.gaps_of(PACKED)
    assert [each.name for each in of_queries.tensors] == ["dq"] and of_queries.optional


# Each chip once, with other problems, so that few kernels are compiled.
@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        ("sm_80", CAUSAL),
        ("sm_86", replace(DROPOUT, dtype_q="fp16", dtype_kv="fp16", dtype_o="fp16")),
        ("sm_89", replace(PACKED, head_dim_qk=96, head_dim_v=96, scores=("alibi",))),
        ("sm_120", replace(MASKED, head_dim_qk=64, head_dim_v=64)),
        ("sm_90", replace(LARGE, masks=("causal",), scores=("softcap",))),
        ("sm_86", replace(CAUSAL, scores=("post_scale_bias",))),
    ],
)
def test_kernels_compile_for_every_chip(arch: str, problem: Problem) -> None:
    for plan in (each for each in plans(problem, arch) if each.family.startswith("mma_")):
        binary, cubin = compile_source(render_problem(problem, plan), problem, arch)
        assert not mistakes_of(binary) and binary.resources.spill_bytes <= MOST_SPILLS
        found = count_instructions(cubin)
        adds = found["RED"] + found["REDG"] > 3
        assert found["HMMA"] > 50 and adds == (plan.family == BACKWARD) and not found["HGMMA"]


WANTED = {
    ("dq", "dk", "dv"): ["bwd_clear", "mma_bwd", "bwd_convert"],
    ("dk", "dv"): ["bwd_clear", "mma_bwd"],
    ("dq",): ["bwd_clear", "mma_bwd", "bwd_convert"],
    ("lse_log2", "d"): ["bwd_clear"],
}


@pytest.mark.parametrize("wanted", WANTED, ids="-".join)
@pytest.mark.parametrize("problem", [DENSE, ORDERED], ids=["any", "ordered"])
def test_kernels_that_a_call_wants_are_launched(problem: Problem, wanted: tuple[str, ...]) -> None:
    kernels = [
        SimpleNamespace(kernel=render_problem(problem, each).kernel)
        for each in plans(problem, "sm_80")
    ]
    found = selection.select(kernels, wanted)
    assert [selection.name_of(each.kernel) for each in found] == WANTED[wanted]
