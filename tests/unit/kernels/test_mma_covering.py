"""Kernels by products of warps compile for chips that have no others, nearly without spills: those
of the covering set and of the example specs."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from attngen.errors import PlanError
from attngen.kernels.base import KernelPlan
from attngen.spec.attention_spec import MAX_HEAD_DIM
from attngen.spec.problem import Problem
from tools import local_accesses
from tools.local_accesses import CHIPS, figures_of, kernels, name_of

MOST_SPILLS, MOST_ACCESSES = 160, 20  # bytes, and loads and stores of local memory a block
NAMED: dict[str, list[int]] = json.loads(local_accesses.PATH.read_text())


def test_what_is_kept_in_local_memory_is_little_and_of_kernels_that_there_are() -> None:
    assert all(spills <= MOST_SPILLS and n <= MOST_ACCESSES for spills, n in NAMED.values())
    assert NAMED.keys() <= {name_of(*job) for job in local_accesses.jobs()}


def calls() -> list[Any]:
    """Each problem for each chip."""
    return [
        pytest.param(problem, arch, id=f"{problem.label}-{arch}")
        for problem, arch in itertools.product(local_accesses.problems(), CHIPS)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("problem, arch", calls())
def test_kernels_compile_or_lack_8_bits_or_wide_heads(problem: Problem, arch: str) -> None:
    """Local memory has no more of them than is named."""
    found: tuple[KernelPlan, ...]
    try:
        found = kernels(problem, arch)
    except PlanError as error:
        wide = max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM
        assert wide or problem.eight_bit or problem.widens or problem.dtype_grad, str(error)
        reasons = ("8 bits", "converts nothing", "head dims above 256", "no tile of split keys")
        assert any(reason in str(error) for reason in reasons)
        return
    for plan in found:
        spills, accesses = NAMED.get(name_of(problem, plan, arch), (0, 0))
        measured = figures_of(problem, plan, arch)
        assert measured[0] <= spills and measured[1] <= accesses, (plan.family, measured)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "problem",
    [each for each in local_accesses.problems() if each.eight_bit and each.direction == "fwd"],
    ids=lambda each: each.label,
)
def test_forwards_in_8_bits_keep_little_where_both_operands_become_16(problem: Problem) -> None:
    """The target is what tests force on Hopper, whose products of warps take no 8 bits."""
    for plan in kernels(problem, "sm_90"):
        spills, accesses = figures_of(problem, plan, "sm_90")
        assert spills <= MOST_SPILLS and accesses <= MOST_ACCESSES, plan.family
