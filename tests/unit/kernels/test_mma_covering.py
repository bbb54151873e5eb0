"""Kernels by products of warps compile for chips that have no others, nearly without spills: those
of the covering set and of the example specs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from attngen import load_specs
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.errors import PlanError
from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.spec import coverage
from attngen.spec.attention_spec import MAX_HEAD_DIM
from attngen.spec.problem import Problem
from attngen.spec.resolve import resolve
from tests.support.paths import ROOT
from tests.support.sass import count_instructions

CHIPS = ("sm_80", "sm_86", "sm_89", "sm_120")
MOST_SPILLS = 160  # bytes
MOST_ACCESSES = 100  # of local memory in a whole kernel, which has several codes of a block


def problems() -> list[Problem]:
    """Problems of the covering set, then those of the example specs, each once."""
    known = features.scan()
    covering = [each for member in coverage.members(known) for each in member.problems(known)]
    paths = sorted((ROOT / "examples" / "specs").glob("*.toml"))
    specs = itertools.chain.from_iterable(map(load_specs, paths))
    return [*dict.fromkeys([*covering, *(each for spec in specs for each in resolve(spec, known))])]


def calls() -> list[Any]:
    """Each problem for the chip of most shared memory, and for one of the others in turn, whose
    plans differ from each other's by products of 8 bits alone."""
    most, *others = CHIPS
    turns = itertools.cycle(others)
    return [
        pytest.param(problem, arch, id=f"{problem.label}-{arch}")
        for problem in problems()
        for arch in (most, next(turns))
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("problem, arch", calls())
def test_kernels_compile_or_lack_8_bits_or_wide_heads(problem: Problem, arch: str) -> None:
    try:
        found = plans(problem, arch)
    except PlanError as error:
        wide = max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM
        assert wide or problem.eight_bit or problem.widens or problem.dtype_grad, str(error)
        reasons = ("8 bits", "converts nothing", "head dims above 256", "no tile of split keys")
        assert any(reason in str(error) for reason in reasons)
        return
    for plan in (each for each in found if each.family.startswith("mma_")):
        binary, cubin = compile_source(render_problem(problem, plan), problem, arch)
        spilled = binary.resources.spill_bytes
        assert spilled <= MOST_SPILLS, plan.family
        if spilled:
            counts = count_instructions(cubin)
            assert counts["STL"] + counts["LDL"] <= MOST_ACCESSES, plan.family
