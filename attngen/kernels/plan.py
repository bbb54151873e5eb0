"""Plan: the mapping of a problem onto an architecture, by the family that serves it there."""

from __future__ import annotations

from typing import Any

from ..errors import PlanError
from ..io.values import from_data
from ..spec.problem import Problem
from ..targets.target import TARGETS, Target
from . import tuned
from .base import KernelPlan, TiledPlan
from .family import families, kind_of, serving


def template_of(plan: KernelPlan) -> str:
    """The template that is filled for a plan, by its name under the templates' root."""
    return f"kernels/{kind_of(plan.family).template}.cu.j2"


def plans(problem: Problem, arch: str) -> tuple[KernelPlan, ...]:
    """The preferred plan of each kernel of the problem, in the order of their launches: one for a
    forward, several for a backward, and one more before them where lengths vary, or where a mask's
    bits are packed; two for a decode. Many a forward has a second one, for short calls, or those
    that want the output alone, which launch it instead.

    Raises: PlanError where the architecture is unknown, no family serves the problem on it, or
    nothing fits it.
    """
    target = _target(arch)
    found = serving(problem, target).plans(problem, target)
    for family in families():
        found = family.surround(problem, target, found)
    return found


def read_plan(data: dict[str, Any]) -> KernelPlan:
    """The plan of one kernel from its JSON data, which name its kernel. Raises: ValueError."""
    name = data.get("family")
    return from_data(kind_of(name if isinstance(name, str) else repr(name)).plan, data)


def plan(problem: Problem, arch: str) -> TiledPlan:
    """The preferred plan of a forward. Raises: as `plans`."""
    return candidates(problem, arch)[0]


def candidates(problem: Problem, arch: str) -> tuple[TiledPlan, ...]:
    """Every feasible plan, the preferred first: what measured fastest, where the problem was
    tuned, else what the heuristics say. Raises: as `feasible`."""
    return tuned.prefer(feasible(problem, arch), tuned.entry_of(problem, arch))


def feasible(problem: Problem, arch: str) -> tuple[TiledPlan, ...]:
    """Every feasible plan, in the order of the heuristics.

    Raises: as `plans`; PlanError where a problem has several kernels.
    """
    target = _target(arch)
    return serving(problem, target).feasible(problem, target)


def _target(arch: str) -> Target:
    if arch not in TARGETS:
        raise PlanError(f"architecture {arch!r} is unknown; available: {[*TARGETS]}")
    return TARGETS[arch]
