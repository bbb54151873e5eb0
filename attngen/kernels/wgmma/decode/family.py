"""The family of the decode: keys are split over CTAs, whose parts a last kernel joins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....runtime.program import KernelEntry
from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import KernelPlan
from ...family import Facts, Family, Kind
from ...support import cost
from ...support.combine import NAME as COMBINE
from ...support.combine import CombinePlan
from ..shared import NEEDS, refuse_together
from . import plan as decode
from .plan import DECODE, DecodePlan

if TYPE_CHECKING:
    from ...fill import Source


class Decode(Family):
    """Outputs of few queries a sequence."""

    needs = NEEDS
    kernels = {
        DECODE: Kind(DecodePlan, "wgmma/decode/decode", frozenset({"o_parts", "lse_parts"})),
        COMBINE: Kind(CombinePlan, "support/combine", frozenset({"o", "lse"})),
    }

    def computes(self, problem: Problem) -> bool:
        return problem.decode

    def refuses(self, problem: Problem) -> Iterator[str]:
        return refuse_together(problem)

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        found = decode.plans(problem, target)
        if not found:
            reason = f"{target.name} has no decode for its head dims or dtypes"
            raise PlanError(f"{problem.label}: {reason}")
        return found

    def splits(self, reader: KernelEntry, facts: Facts, keys: int) -> int:
        return cost.splits_of(reader, facts, keys)

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from ...support import render_combine
        from . import render

        if plan.family == COMBINE:
            return render_combine.render(problem, cast(CombinePlan, plan), features, root)
        return render.render(problem, cast(DecodePlan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        if plan.family != DECODE:
            yield from super().aim(problem, plan, target)
            return
        reads, size = cast(DecodePlan, plan), DTYPE_BYTES[problem.dtype_kv]
        rows, ctas = reads.tile.m, reads.ctas
        yield (
            f"aims at the memory: {2 * rows // size} FLOPs for each byte of K and V with all "
            f"{rows} rows in use; {ctas} CTA{'s' if ctas > 1 else ''} an SM"
        )


FAMILY = Decode()
