"""Plans of 8-bit operands: every pair of head dims fits, and its sums leave the tensor cores."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from attngen.kernels.plan import candidates
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.spec.problem import Problem

ARCH = "sm_90a"
SMEM_BYTES = 227 * 1024
BOX = 128  # bytes of a row in shared memory
DIMS = range(16, 257, 16)
KEYS = {2: 1024, 3: 1920}  # that the tensor cores may sum, by the number of consumers


def boxes(columns: int, element_bytes: int = 1) -> int:
    return -(-columns * element_bytes // BOX) * BOX


def region(plan: Plan, name: str) -> int:
    return next(each.bytes for each in plan.smem if each.name == name)


def check(problem: Problem, plan: Plan) -> None:
    m, n, pipeline, d_v = plan.tile.m, plan.tile.n, plan.pipeline, problem.head_dim_v
    assert plan.smem_bytes <= SMEM_BYTES and n % 32 == 0 and n % pipeline.raw_keys == 0
    assert pipeline.raw_keys % 32 == 0  # four matrices of 8 keys at a time
    assert region(plan, "Q") == m * boxes(problem.head_dim_qk)
    assert region(plan, "K") == pipeline.k_stages * n * boxes(problem.head_dim_qk)
    assert region(plan, "V") == pipeline.v_stages * d_v * boxes(n)
    assert region(plan, "Raw") == pipeline.raw_stages * pipeline.raw_keys * boxes(d_v)
    assert 1 <= plan.promote_blocks and plan.promote_blocks * n <= KEYS[pipeline.consumers]
    output = m * boxes(d_v, 2 if problem.dtype_o == "bf16" else 1)
    mean = 0 if plan.promote_blocks == 1 else m * boxes(d_v, 2)
    assert region(plan, "O") == max(output, mean) and not pipeline.output_over_q
    consumers = pipeline.consumers  # of four warpgroups, two or three
    assert consumers == 2 or (consumers == 3 and max(problem.head_dim_qk, d_v) <= 128)
    registers = (4 - consumers) * pipeline.producer_registers
    assert registers + consumers * pipeline.consumer_registers == plan.threads == 512
    assert plan.operand_registers <= pipeline.consumer_registers - 24


@pytest.mark.sampled(2)
@pytest.mark.parametrize("out", ["bf16", "e4m3"])
@pytest.mark.parametrize("masks", [(), ("causal",)])
def test_candidates_every_head_dim_pair_has_plans_that_fit(masks, out, make_problem) -> None:
    plain = make_problem(128, None, masks)
    for head_dim, head_dim_v in itertools.product(DIMS, DIMS):
        problem = replace(
            plain,
            **{"dtype_q": "e4m3", "dtype_kv": "e4m3", "dtype_o": out},
            **{"head_dim_qk": head_dim, "head_dim_v": head_dim_v},
        )
        found = candidates(problem, ARCH)
        assert found and len(set(found)) == len(found)
        for plan in found:
            check(problem, plan)
