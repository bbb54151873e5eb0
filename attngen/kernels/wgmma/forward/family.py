"""The family of the forward: one kernel of large tiles, and others for some calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....spec.problem import Problem
from ....targets.target import Target
from ... import tuned
from ...base import KernelPlan, TiledPlan
from ...family import Choice, Facts, Family, Kind
from ...roofline import Block, aim_of
from ..shared import NEEDS, refuse_together
from . import alone, cost, feasible, short, wide
from .plan import ALONE, FORWARD, SHORT, WIDE, Plan

if TYPE_CHECKING:
    from ...fill import Source

OUTPUTS = frozenset({"o", "lse", "max_logit"})


class Forward(Family):
    """Outputs of prompts, in 16 and 8 bits."""

    needs = NEEDS
    kernels = {
        FORWARD: Kind(Plan, "wgmma/forward/forward", OUTPUTS),
        SHORT: Kind(Plan, "wgmma/forward/short", OUTPUTS),
        ALONE: Kind(Plan, "wgmma/forward/alone", frozenset({"o"})),
        WIDE: Kind(Plan, "wgmma/forward/wide", OUTPUTS),
    }

    def computes(self, problem: Problem) -> bool:
        return problem.direction == "fwd" and not problem.decode

    def refuses(self, problem: Problem) -> Iterator[str]:
        return refuse_together(problem)

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        if wide.is_wide(problem):
            return self.feasible(problem, target)[:1]
        entry = tuned.entry_of(problem, target.name)
        preferred = tuned.prefer(self.feasible(problem, target), entry)[0]
        others = short.plans(problem, target) or alone.plans(problem, target)
        return (preferred, *others)

    def feasible(self, problem: Problem, target: Target) -> tuple[TiledPlan, ...]:
        plans = wide.plans if wide.is_wide(problem) else feasible.feasible
        found = tuple(plans(problem, target))
        if not found:
            reason = f"no tile fits {target.name}'s registers and shared memory"
            raise PlanError(f"{problem.label}: {reason}")
        return found

    def choose(self, problems: Sequence[Problem], target: Target, facts: Facts) -> Choice:
        (problem,) = problems
        if wide.is_wide(problem):
            return Choice(kernel=WIDE)
        if problem.eight_bit:
            return Choice(kernel=FORWARD if "lse" in facts.wants else ALONE)
        shorter = short.serves(problem) and cost.is_short(problem, facts)
        return Choice(kernel=SHORT if shorter else FORWARD)

    def is_tuned(self, plan: KernelPlan) -> bool:
        return plan.family == FORWARD

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from .render import render

        return render(problem, cast(Plan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        tiled = cast(Plan, plan)
        return aim_of(problem, tiled, Block(1, 1, keys_come=True, ctas=tiled.ctas), target)


FAMILY = Forward()
