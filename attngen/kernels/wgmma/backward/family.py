"""The family of the backward: one kernel for all gradients or two, and others around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....spec.problem import Problem
from ....targets.target import Target
from ...base import KernelPlan
from ...family import Family, Kind
from ...roofline import Block, aim_of
from ..shared import NEEDS, refuse_together
from . import choices
from .plan import (
    CONVERT,
    MAIN,
    OF_BIAS,
    OF_KEYS,
    OF_QUERIES,
    PREPARE,
    ROW_SUMS,
    WITH_BIAS,
    AnyPlan,
    BackwardPlan,
    BiasGradientPlan,
    ConvertPlan,
    PreparePlan,
    RowSumsPlan,
)

if TYPE_CHECKING:
    from ...fill import Source

# Products of a block over Q's head dim, and over V's: S, dQ, dK; dP, dV.
PRODUCTS = {MAIN: (3, 2), WITH_BIAS: (3, 2), OF_KEYS: (2, 2), OF_QUERIES: (2, 1)}


class Backward(Family):
    """Gradients of Q, K, V and of biases, in 16 bits."""

    needs = NEEDS
    kernels = {
        PREPARE: Kind(PreparePlan, "support/prepare"),
        MAIN: Kind(BackwardPlan, "wgmma/backward/fused"),
        WITH_BIAS: Kind(BackwardPlan, "wgmma/backward/fused"),
        OF_KEYS: Kind(BackwardPlan, "wgmma/backward/dkv"),
        OF_QUERIES: Kind(BackwardPlan, "wgmma/backward/dq"),
        CONVERT: Kind(ConvertPlan, "support/convert"),
        ROW_SUMS: Kind(RowSumsPlan, "support/row_sums"),
        OF_BIAS: Kind(BiasGradientPlan, "wgmma/backward/dbias"),
    }

    def computes(self, problem: Problem) -> bool:
        return problem.direction == "bwd" and not problem.decode

    def refuses(self, problem: Problem) -> Iterator[str]:
        return refuse_together(problem)

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        found = choices.plans(problem, target)
        if not found:
            reason = f"{target.name} has no backward for its head dims or dtypes"
            raise PlanError(f"{problem.label}: {reason}")
        return found

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from .render import render

        return render(problem, cast(AnyPlan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        if plan.family not in PRODUCTS:
            return super().aim(problem, plan, target)
        keys_come = plan.family == OF_QUERIES
        block = Block(*PRODUCTS[plan.family], keys_come=keys_come, ctas=1)
        return aim_of(problem, cast(BackwardPlan, plan), block, target)


FAMILY = Backward()
