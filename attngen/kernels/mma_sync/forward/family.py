"""The family of the forward by products of warps, for targets that have no larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....spec.problem import Problem
from ....targets.target import Target
from ... import tuned
from ...base import KernelPlan, TiledPlan
from ...family import Family, Kind
from ...roofline import Block, aim_of
from . import choices
from .plan import FORWARD, Plan

if TYPE_CHECKING:
    from ...fill import Source


class MmaForward(Family):
    """Outputs of prompts, of 16- and 8-bit operands."""

    needs = frozenset({"cp_async"})
    avoids = frozenset({"wgmma"})
    kernels = {
        FORWARD: Kind(Plan, "mma_sync/forward/forward", frozenset({"o", "lse", "max_logit"}))
    }

    def computes(self, problem: Problem) -> bool:
        return problem.direction == "fwd" and not problem.decode

    def refuses(self, problem: Problem) -> Iterator[str]:
        beside = problem.bias or problem.paged or problem.eight_bit
        joins_wide = problem.continues and problem.head_dim_v > choices.OWN_COLUMNS
        unserved = {
            "mask that was made before, beside a bias, pages and 8 bits": problem.listed and beside,
            f"output of more than {choices.OWN_COLUMNS} columns that joins another": joins_wide,
        }
        for what, asked in unserved.items():
            if asked:
                yield f"kernels of mma.sync have no {what} yet"
        more = problem.bias or problem.attn_mask or problem.dropout
        if problem.widens and (more or problem.positions or problem.continues or problem.gather):
            yield "no kernel does all of this together yet"

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        found = super().refusals(problem, target)
        if problem.eight_bit and not target.fp8:
            found.append(f"{target.name} has no products of 8 bits")
        if problem.widens and not target.fp8:
            found.append(f"{target.name} converts nothing from {problem.dtype_kv}")
        return found

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        entry = tuned.entry_of(problem, target.name)
        return tuned.prefer(self.feasible(problem, target), entry)[:1]

    def feasible(self, problem: Problem, target: Target) -> tuple[TiledPlan, ...]:
        found = tuple(choices.feasible(problem, target))
        if not found:
            reason = f"no tile fits {target.name}'s registers and shared memory"
            raise PlanError(f"{problem.label}: {reason}")
        return found

    def is_tuned(self, plan: KernelPlan) -> bool:
        return plan.family == FORWARD

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from .render import render

        return render(problem, cast(Plan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        tiled = cast(Plan, plan)
        scores = tiled.column_parts  # each warp of a part makes them
        block = Block(scores, 1, keys_come=True, ctas=tiled.ctas, persistent=False)
        return aim_of(problem, tiled, block, target)


FAMILY = MmaForward()
