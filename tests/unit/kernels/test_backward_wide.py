"""Head dims above 256: a backward whose CTAs have half of the columns each, what it fits in, that
it compiles, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from attngen import AttentionSpec
from attngen.call.served import unserved
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.fragments import features
from attngen.io.values import to_data
from attngen.kernels.plan import plans, read_plan
from attngen.kernels.wgmma.backward.wide import cta_columns
from attngen.spec import resolve
from attngen.targets.target import DEFAULT
from tests.support.cache_kit import ARCH

KNOWN = features.scan()
REGISTERS = 504  # of three warpgroups, as a launch gives them out
PAIRED = ("sm90_bwd_dkv", "sm90_bwd_dq")
ALL_BITS = {"bias": "pre_scale", "softcap": True, "attn_mask": True, "dropout": True}


def plans_of(head_dim=512, **fields):
    (problem,) = resolve.resolve(AttentionSpec(head_dim, directions=("bwd",), **fields), KNOWN)
    return plans(problem, ARCH), problem


def test_plans_of_any_head_dims_fit_and_are_pairs():
    sides = [264, 320, 384, 448, 512]
    for d, d_v in [*itertools.product(sides, [72, 256, *sides]), (64, 512), (300, 77)]:
        for fields in ({}, {"mask": "causal"}, {"bias": "post_scale", "dropout": True}):
            found, problem = plans_of(d, head_dim_v=d_v, **fields)
            pairs = [plan for plan in found if plan.family in PAIRED]
            assert [plan.family for plan in pairs] == [*PAIRED]
            assert max(cta_columns(problem)) <= 256
            for plan in pairs:
                widest = max(cta_columns(problem)) == 256
                boxed = d % 8 == d_v % 8 == 0
                assert plan.sends_ahead == (widest and boxed and "bias" not in fields)
                registers = plan.producer_registers + 2 * plan.consumer_registers
                assert plan.pairs and (plan.threads, registers) == (384, REGISTERS)
                assert plan.smem_bytes <= DEFAULT.cta_smem_bytes
                assert read_plan(to_data(plan)) == plan
                for region, following in itertools.pairwise(plan.smem):
                    assert region.offset + region.bytes <= following.offset


def test_halves_of_columns_cover_those_of_any_head_dim():
    for d in range(257, 513):
        _, problem = plans_of(d)
        columns, columns_v = cta_columns(problem)
        assert columns == columns_v and columns % 64 == 0 and columns < d <= 2 * columns


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "causal", "softcap": True, "alibi": True},
        {"layout": "thd", "window": True, "dropout": True, "bias": "post_scale"},
        {"head_dim": 300, "head_dim_v": 77, "gather": True, "softcap": True, "attn_mask": True},
        {"layout": "thd", "mask": "causal", "head_dim_v": 64},
        {"softcap": True, "dropout": True, "positions": True, "head_dim_v": 128},
        {"layout": "thd", "alibi": True, "head_dim_v": 128, **ALL_BITS},
        {"gather": True, "seqused": True, "head_dim_v": 448, "mask": "causal", **ALL_BITS},
    ],
    ids=["capped", "packed", "gathered", "narrow", "drawn", "packed bits", "gathered bits"],
)
def test_kernels_compile_without_spills(fields):
    found, problem = plans_of(**fields)
    for plan in found:
        binary, _ = compile_source(render_problem(problem, plan), problem, ARCH)
        assert not binary.resources.in_local_memory


def test_wider_heads_are_refused_with_the_arithmetic():
    spec = AttentionSpec(576, head_dim_v=512, directions=("bwd",))
    (found,) = resolve.find_violations(spec, KNOWN)
    assert (found.field, found.nearest) == ("head_dim", 512) and "128 registers" in found.reason


def test_other_architectures_refuse_by_name():
    spec = AttentionSpec(320, directions=("bwd",))
    assert "no head dims above 256" in unserved(spec, "sm_80")[0]
