"""A sample of all kernels that can be asked for compiles: what spills where many features meet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.spec import resolve
from attngen.spec.attention_spec import AttentionSpec
from tools import sweep

SM_REGISTERS = 65536
WIDE_PROBLEMS = 12  # 40 kernels: a minute of CPU time
# Everything a row of scores can ask for at once.
CROWD: dict[str, Any] = {
    "attn_mask": True, "alibi": True, "softcap": True, "softmax": "learnable", "dropout": True
}  # fmt: skip
# Kernels with no register to spare: a change of what they share makes these spill first.
EDGES = [
    AttentionSpec(64, dtype="fp16", mask="causal", softcap=True, directions=("fwd",)),
    AttentionSpec(224, mask="causal", window=True, directions=("fwd",)),
    AttentionSpec(128, layout="thd", window=True, softcap=True, directions=("fwd",)),
    AttentionSpec(128, gather=True, window=True, softcap=True, directions=("fwd",)),
    AttentionSpec(
        112,
        layout="paged_kv_thd_bshd_bshd",
        mask="causal",
        window=True,
        softcap=True,
        directions=("fwd",),
    ),
    AttentionSpec(128, layout="thd", window=True, directions=("bwd",)),
    AttentionSpec(64, layout="thd", mask="causal", directions=("bwd",)),
    AttentionSpec(128, seqused=True, mask="causal", directions=("bwd",)),
    AttentionSpec(256, layout="thd", mask="causal", directions=("bwd",)),
    AttentionSpec(64, seqused=True, window=True, alibi=True, directions=("bwd",)),
    AttentionSpec(250, mask="causal", gather=True, directions=("fwd",), **CROWD),
    AttentionSpec(250, mask="causal", return_max_logit=True, directions=("fwd",), **CROWD),
    AttentionSpec(128, head_dim_v=72, bias="pre_scale", directions=("fwd",)),
    AttentionSpec(128, head_dim_v=192, dtype="e4m3", out_dtype="e4m3", mask="causal", window=True),
    AttentionSpec(
        240, head_dim_v=32, dtype="e4m3", kv_dtype="e5m2", out_dtype="fp16", mask="causal"
    ),
    AttentionSpec(256, mask="causal", deterministic=True, directions=("bwd",), **CROWD),
    AttentionSpec(
        256, dtype="fp16", seqused=True, deterministic=True, directions=("bwd",), **CROWD
    ),
]


def test_sample_is_of_legal_problems_and_the_same_each_time() -> None:
    problems = sweep.sample(200, seed=0)
    assert problems == sweep.sample(200, seed=0) != sweep.sample(200, seed=1)
    assert len(set(problems)) == 200
    assert {problem.direction for problem in problems} == {"fwd", "bwd"}
    assert {problem.kv_fetch for problem in problems} == {"tma", "page_tma", "gather"}
    assert any(problem.decode for problem in problems)
    assert len({problem.head_dim_qk for problem in problems}) > 20


def test_every_legal_problem_has_plans() -> None:
    for problem in sweep.sample(600, seed=2):
        assert plans(problem, "sm_90a")


def test_warpgroups_share_no_more_registers_than_a_launch_has() -> None:
    """One that asks for more waits for ever for those of others."""
    families = set()
    chosen: Iterator[Any] = (x for y in sweep.sample(600, seed=4) for x in plans(y, "sm_90a"))
    for plan in chosen:
        roles = getattr(plan, "pipeline", plan)
        kept = getattr(roles, "producer_registers", getattr(roles, "loader_registers", 0))
        if not kept:
            continue
        families.add(plan.family)
        warpgroups = plan.threads // 128
        launched = SM_REGISTERS // plan.threads // 8 * 8
        taken = roles.consumers * roles.consumer_registers
        assert kept * (warpgroups - roles.consumers) + taken <= launched * warpgroups, plan
    assert families >= {"sm90_fwd", "sm90_bwd", "sm90_bwd_dkv", "sm90_bwd_dq", "sm90_bwd_dbias"}


def test_drawn_spec_is_legal_as_it_is() -> None:
    choose = random.Random(3)
    for _ in range(50):
        assert not resolve.find_violations(sweep.draw(choose), features.scan())


@pytest.mark.slow
def test_check_names_what_may_not_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = sweep.sample(1, seed=0)
    monkeypatch.setattr(sweep, "MOST_BYTES", 100)
    found = sweep.check(problem)
    assert found and all("bytes in a bundle" in line for line in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sample_compiles_into_kernels_that_may_ship() -> None:
    assert list(sweep.failures(sweep.sample(24, seed=0))) == []


def test_wide_sample_crosses_features_and_is_the_same_each_time() -> None:
    problems = sweep.wide_sample(12, seed=0)
    assert problems == sweep.wide_sample(12, seed=0) != sweep.wide_sample(12, seed=1)
    assert all(max(each.head_dim_qk, each.head_dim_v) > 256 for each in problems)
    assert {each.direction for each in problems} == {"fwd", "bwd"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wide_sample_compiles_into_kernels_that_may_ship() -> None:
    assert list(sweep.failures(sweep.wide_sample(WIDE_PROBLEMS, seed=0))) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_with_no_register_to_spare_may_ship() -> None:
    problems = [each for spec in EDGES for each in resolve.resolve(spec, features.scan())]
    assert list(sweep.failures(problems)) == []
