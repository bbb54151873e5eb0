"""The family of the backward by products of warps, for targets that have no larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import KernelPlan
from ...family import Family, Kind
from ...roofline import Block, aim_of
from . import choices
from .plan import BACKWARD, OF_BIAS, OF_LEARNED, BiasPlan, LearnedPlan, Plan

if TYPE_CHECKING:
    from ...fill import Source


MADE = frozenset({"dq_added", "dk", "dv"})


class MmaBackward(Family):
    """Gradients of Q, K, V, of biases and of what scores learn, of 16-bit operands."""

    needs = frozenset({"cp_async"})
    avoids = frozenset({"wgmma"})
    kernels = {
        BACKWARD: Kind(Plan, "mma_sync/backward/backward", MADE, frozenset({"dq"})),
        OF_BIAS: Kind(BiasPlan, "mma_sync/backward/dbias", frozenset({"dbias"})),
        OF_LEARNED: Kind(LearnedPlan, "mma_sync/backward/dlearned", frozenset({"dlearned"})),
    }

    def computes(self, problem: Problem) -> bool:
        return problem.direction == "bwd"

    def refuses(self, problem: Problem) -> Iterator[str]:
        largest = max(problem.head_dim_qk, problem.head_dim_v)
        unserved = {
            "mask that was made before, beside a bias": problem.listed and problem.bias,
            f"head dims above {MAX_HEAD_DIM}": largest > MAX_HEAD_DIM,
            "operands of 8 bits": DTYPE_BYTES[problem.dtype_q] == 1,
        }
        for what, asked in unserved.items():
            if asked:
                yield f"backwards of mma.sync have no {what} yet"

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        main = next(choices.feasible(problem, target), None)
        if main is None:
            reason = f"no tile fits {target.name}'s registers and shared memory"
            raise PlanError(f"{problem.label}: {reason}")
        return choices.around(problem, main, target)

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from . import render, render_bias, render_learned

        if plan.family == OF_BIAS:
            return render_bias.render(problem, cast(BiasPlan, plan), features, root)
        if plan.family == OF_LEARNED:
            return render_learned.render(problem, cast(LearnedPlan, plan), features, root)
        return render.render(problem, cast(Plan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        if plan.family in (OF_BIAS, OF_LEARNED):
            return super().aim(problem, plan, target)
        tiled = cast(Plan, plan)
        block = Block(3, 2, keys_come=False, ctas=tiled.ctas, persistent=False)
        return aim_of(problem, tiled, block, target)


FAMILY = MmaBackward()
