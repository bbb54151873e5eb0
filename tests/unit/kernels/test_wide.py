"""Head dims above 256: a forward whose output two warpgroups share, what it fits in, that it
compiles, and what is refused."""

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
from attngen.spec import resolve
from attngen.targets.target import DEFAULT
from tests.support.cache_kit import ARCH

KNOWN = features.scan()
REGISTERS = 504  # of three warpgroups, as a launch gives them out
JOINS = {"out_dtype": "fp32", "positions": True, "continues": True}
CAPPED = {"window": True, "softcap": True}


def plan_of(head_dim=512, **fields):
    (problem,) = resolve.resolve(AttentionSpec(head_dim, **fields), KNOWN)
    return plans(problem, ARCH)[-1], problem


def test_plan_of_any_head_dims_fits_and_is_its_own():
    sides = [264, 320, 384, 448, 512]
    for d, d_v in [*itertools.product(sides, [72, 256, *sides]), (576, 512), (64, 512), (300, 77)]:
        for fields in ({}, {"mask": "causal"}, {"bias": "post_scale", "dropout": True}):
            plan, _ = plan_of(d, head_dim_v=d_v, **fields)
            assert (plan.family, plan.threads) == ("sm90_fwd_wide", 384)
            assert plan.pairs == (d % 8 == d_v % 8 == 0) and plan.tile.m == 64 << plan.pairs
            assert plan.smem_bytes <= DEFAULT.smem_share(1) and plan.ctas == 1
            assert read_plan(to_data(plan)) == plan
            for region, following in itertools.pairwise(plan.smem):
                assert region.offset + region.bytes <= following.offset


def test_registers_of_three_warpgroups_are_those_of_a_launch():
    plan, problem = plan_of()
    text = render_problem(problem, plan).text
    numbers = dict(
        line.removeprefix("constexpr int ").rstrip(";").split(" = ")
        for line in text.splitlines()
        if line.startswith("constexpr int k") and "Registers = " in line
    )
    roles = ("kProducerRegisters", "kConsumerRegisters", "kRestRegisters")
    assert sum(int(numbers[name]) for name in roles) == REGISTERS


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "causal", "softcap": True},
        {"layout": "thd", "window": True, "dropout": True, "bias": "post_scale"},
        {"head_dim": 576, "head_dim_v": 512, "gather": True, "softcap": True},
        {"head_dim": 576, "head_dim_v": 512, "gather": True, "window": True, "dropout": True},
        {"gather": True, "seqused": True, "dropout": True, "return_max_logit": True},
        {"layout": "thd", "dtype": "fp16", **JOINS},
        {"layout": "thd", "mask": "causal", "window": True, "gather": True, **JOINS},
        {"head_dim": 576, "head_dim_v": 512, "mask": "causal", "gather": True, **CAPPED},
    ],
    ids=[
        *("capped", "packed", "gathered", "gathered window", "gathered lengths"),
        *("joined", "gathered joined", "gathered capped"),
    ],
)
def test_kernel_compiles_without_spills(fields):
    plan, problem = plan_of(**fields)
    binary, _ = compile_source(render_problem(problem, plan), problem, ARCH)
    assert not binary.resources.in_local_memory


def test_other_architectures_serve_them_too():
    assert not any(unserved(AttentionSpec(*dims), "sm_86") for dims in [(320,), (576, 512)])
