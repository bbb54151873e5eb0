"""Plan: the mapping of a problem onto an architecture."""

from __future__ import annotations

from . import tuned
from .arch import sm90
from .arch.base import Plan
from .errors import PlanError
from .problem import Problem

ARCHITECTURES = {sm90.ARCH: sm90}


def plan(problem: Problem, arch: str) -> Plan:
    """The preferred plan.

    Raises: PlanError where the architecture is unknown or nothing fits it.
    """
    return candidates(problem, arch)[0]


def candidates(problem: Problem, arch: str) -> tuple[Plan, ...]:
    """Every feasible plan, the preferred first: what measured fastest, where the problem was
    tuned, else what the heuristics say."""
    return tuned.prefer(feasible(problem, arch), tuned.entry_of(problem, arch))


def feasible(problem: Problem, arch: str) -> tuple[Plan, ...]:
    """Every feasible plan, in the order of the heuristics. Raises: as `plan`."""
    if arch not in ARCHITECTURES:
        raise PlanError(f"architecture {arch!r} is unknown; available: {[*ARCHITECTURES]}")
    found = tuple(ARCHITECTURES[arch].feasible(problem))
    if not found:
        raise PlanError(f"{problem.label}: no tile fits {arch}'s registers and shared memory")
    return found
