"""Plans of kernels that widen 8-bit keys and values: every head dim has one, and what it needs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from attngen import AttentionSpec, errors
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.fragments import features
from attngen.io.values import to_data
from attngen.kernels.plan import plans, read_plan
from attngen.spec import resolve
from attngen.targets.target import DEFAULT
from tests.support.sass import count_instructions

ARCH = "sm_90a"
PAGED = "paged_kv_bshd_bshd_bshd"
KNOWN = features.scan()
DIMS = range(16, 257, 16)


def problem_of(head_dim=128, kv_dtype="e4m3", **fields):
    spec = AttentionSpec(head_dim, kv_dtype=kv_dtype, **fields)
    (problem,) = resolve.resolve(spec, KNOWN)
    return problem


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": "causal", "window": True, "layout": PAGED},
        {"layout": PAGED, "softcap": True, "alibi": True, "window": True, "return_max_logit": True},
        {"layout": "thd", "softcap": True, "mask": "causal"},
    ],
    ids=str,
)
def test_plans_of_every_pair_of_head_dims_fit(fields):
    plain = problem_of(**fields)
    for d, d_v in itertools.product(DIMS, repeat=2):
        problem = dataclasses.replace(plain, head_dim_qk=d, head_dim_v=d_v)
        plan = plans(problem, ARCH)[-1]
        assert plan.smem_bytes <= DEFAULT.cta_smem_bytes and read_plan(to_data(plan)) == plan
        assert plan.threads == 512 and plan.tile.n % plan.pipeline.raw_keys == 0
        assert 128 % plan.pipeline.raw_keys == 0  # threads that widen a row
        registers = 2 * plan.pipeline.producer_registers + 2 * plan.pipeline.consumer_registers
        assert registers <= 512
        sizes = {region.name: region.bytes for region in plan.smem}
        raw = plan.pipeline.raw_stages * plan.pipeline.raw_keys * 128
        assert sizes["RawK"] == raw * -(-d // 128) and sizes["RawV"] == raw * -(-d_v // 128)
        assert sizes["K"] == plan.pipeline.k_stages * plan.tile.n * 128 * -(-d // 64)


@pytest.mark.parametrize("layout", ["bshd", PAGED])
def test_decode_plans_of_every_pair_of_head_dims_fit(layout):
    plain = problem_of(decode=True, layout=layout)
    for d, d_v in [*itertools.product(DIMS, repeat=2), (576, 512), (16, 512), (320, 384)]:
        problem = dataclasses.replace(plain, head_dim_qk=d, head_dim_v=d_v)
        plan, combine = plans(problem, ARCH)
        assert plan.smem_bytes <= DEFAULT.smem_share(plan.ctas)
        assert combine.family == "combine" and read_plan(to_data(plan)) == plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "causal"},
        {"dtype": "fp16", "kv_dtype": "e5m2", "layout": "thd"},
        {"head_dim": 256, "mask": "causal", "window": True, "layout": PAGED},
        {"head_dim": 16, "head_dim_v": 256},
        {"head_dim": 208, "layout": PAGED, "mask": "causal"},
        {
            "head_dim": 80,
            "head_dim_v": 48,
            "layout": PAGED,
            "softcap": True,
            "alibi": True,
            "softmax": "learnable",
            "return_max_logit": True,
        },
        {"decode": True},
        {"decode": True, "dtype": "fp16", "kv_dtype": "e5m2", "layout": PAGED, "mask": "causal"},
        {"decode": True, "head_dim": 192, "head_dim_v": 128, "layout": "paged_kv_thd_bshd_bshd"},
        {"decode": True, "head_dim": 256, "window": True, "softcap": True, "alibi": True},
        {"decode": True, "head_dim": 576, "head_dim_v": 512, "layout": PAGED},
    ],
    ids=str,
)
def test_widening_kernels_compile_and_keep_everything_in_registers(fields):
    problem = problem_of(**fields)
    plan = next(p for p in plans(problem, ARCH) if p.family in ("sm90_fwd", "sm90_decode"))
    binary, cubin = compile_source(render_problem(problem, plan), problem, ARCH)
    assert (binary.resources.spill_bytes, binary.resources.stack_bytes) == (0, 0)
    counts = count_instructions(cubin)
    assert counts["HGMMA"] and counts["UTMALDG"] and not counts["STL"]


@pytest.mark.parametrize("hidden", ["dropout", "attn_mask"])
def test_plans_beside_what_a_kernel_would_leave_out_are_refused(hidden):
    problem = dataclasses.replace(problem_of(), **{hidden: True})
    with pytest.raises(errors.PlanError, match="together"):
        plans(problem, ARCH)
