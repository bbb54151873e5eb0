"""The family of the backward: one kernel for all gradients or two, and others around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....spec.problem import Problem
from ....targets.target import Target
from ...base import KernelPlan
from ...family import Choice, Facts, Family, Kind
from ...roofline import Block, aim_of
from ...support.around import ConvertPlan
from ..shared import NEEDS, refuse_together
from . import choices, cost
from .fp8_choices import column_parts
from .kept import dq_parts
from .plan import (
    CONVERT_8,
    MAIN,
    MAIN_8,
    OF_BIAS,
    OF_KEPT,
    OF_KEYS,
    OF_LEARNED,
    OF_QUERIES,
    PREPARE_8,
    WITH_BIAS,
    WITH_SUMS,
    AnyPlan,
    BackwardPlan,
    BiasGradientPlan,
    LearnedPlan,
    TurningPlan,
)
from .wide import cta_columns

if TYPE_CHECKING:
    from ...fill import Source

# Products of a block over Q's head dim, and over V's: S, dQ, dK; dP, dV.
PRODUCTS = {
    **{MAIN: (3, 2), MAIN_8: (3, 2), WITH_BIAS: (3, 2), WITH_SUMS: (3, 2)},
    **{OF_KEYS: (2, 2), OF_QUERIES: (2, 1), OF_KEPT: (1, 0)},
}

# Of a half of dQ, dK and dV, beside which S and dP are whole; and of these in 16 bits, which take
# twice the time of 8.
PRODUCTS_OF_HALVES = (2.0, 1.5)
PRODUCTS_OF_BOTH = (5, 3)

ROWS = frozenset({"lse_log2", "d", "turns"})
# dQ, or what is converted to it, and sums of dK and dV where heads have tiles of their own.
GRADIENTS = frozenset({"dq", "dq_acc", "dk", "dv", "dkv_acc"})


class Backward(Family):
    """Gradients of Q, K, V and of biases, in 16 bits."""

    needs = NEEDS
    kernels = {
        MAIN: Kind(
            BackwardPlan, "wgmma/backward/fused", GRADIENTS | {"dlearned"}, frozenset({"dq"})
        ),
        WITH_BIAS: Kind(
            BackwardPlan, "wgmma/backward/fused", GRADIENTS | {"dbias"}, frozenset({"dq"}), 1.5
        ),
        WITH_SUMS: Kind(
            BackwardPlan, "wgmma/backward/fused", GRADIENTS | {"dbias"}, frozenset({"dq"}), 1.5
        ),
        OF_KEYS: Kind(BackwardPlan, "wgmma/backward/dkv", frozenset({"dk", "dv", "d_s"})),
        OF_QUERIES: Kind(BackwardPlan, "wgmma/backward/dq", frozenset({"dq"})),
        OF_KEPT: Kind(BackwardPlan, "wgmma/backward/dq_kept", frozenset({"dq"}), cost=0.9),
        PREPARE_8: Kind(
            TurningPlan, "wgmma/backward/fp8_prepare", ROWS | {"queries_turned", "keys_turned"}
        ),
        MAIN_8: Kind(BackwardPlan, "wgmma/backward/fp8", GRADIENTS - {"dq"}, frozenset({"dq"})),
        CONVERT_8: Kind(ConvertPlan, "wgmma/backward/fp8_convert", frozenset({"dq"})),
        OF_BIAS: Kind(BiasGradientPlan, "wgmma/backward/dbias", frozenset({"dbias"})),
        OF_LEARNED: Kind(LearnedPlan, "wgmma/backward/dlearned", frozenset({"dlearned"})),
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

    def choose(self, problems: Sequence[Problem], target: Target, facts: Facts) -> Choice:
        """Under a narrow window the problem in an order, the last, where calls ask for none; and
        heads of tiles of their own, which the kernels in an order do not have."""
        problem, *in_order = problems
        dq = "dq" in facts.wants
        narrow = dq and not problem.deterministic and cost.is_narrow(facts.extents, facts.scalars)
        # A table holds the order of all calls that it serves.
        if dq and "dk" in facts.wants and not facts.scheduled:
            gain = cost.GAIN_NARROW if narrow and in_order else cost.GAIN
            if self.splits_heads(problem, target, facts, gain):
                return Choice(splits_heads=True)
        return Choice(place=len(in_order) if narrow else 0)

    def splits_heads(self, problem: Problem, target: Target, facts: Facts, gain: float) -> bool:
        """Whether tiles of query heads that share keys are so much faster, where kernels have
        them."""
        if facts.extents["q"].heads == facts.extents["k"].heads:
            return False
        mains = (each for each in choices.plans(problem, target) if each.family == MAIN)
        main = cast("BackwardPlan | None", next(mains, None))
        fits = main is not None and main.splits_heads
        return fits and cost.have_few_tiles(problem, cast(BackwardPlan, main), facts, gain)

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from .render import render

        return render(problem, cast(AnyPlan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        if plan.family not in PRODUCTS:
            return super().aim(problem, plan, target)
        keys_come = plan.family in (OF_QUERIES, OF_KEPT)
        halves = plan.family == MAIN_8 and column_parts(problem) > 1
        products: tuple[float, float] = PRODUCTS_OF_HALVES if halves else PRODUCTS[plan.family]
        products = PRODUCTS_OF_BOTH if problem.mixed else products
        of_qk, of_v = products
        block = Block(of_qk, of_v, keys_come=keys_come, ctas=1)
        columns, columns_v = cta_columns(problem)
        if plan.family == OF_KEPT:
            columns = dq_parts(problem)[1]
        of_cta = replace(problem, head_dim_qk=columns, head_dim_v=columns_v)
        return aim_of(of_cta, cast(BackwardPlan, plan), block, target)


FAMILY = Backward()
