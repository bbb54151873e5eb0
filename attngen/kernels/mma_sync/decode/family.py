"""The family of the decode by products of warps, for targets that have no larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....errors import PlanError
from ....fragments.features import Features
from ....fragments.program import has_program
from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ....targets.target import Target
from ...base import KernelPlan
from ...family import Facts, Family, Kind
from ...support import cost
from . import plan as decode
from .plan import DECODE, DecodePlan

if TYPE_CHECKING:
    from ...fill import Source


class MmaDecode(Family):
    """Outputs of few queries a sequence, of 16 bits beside keys and values of 16 or 8."""

    needs = frozenset({"cp_async"})
    avoids = frozenset({"wgmma"})
    kernels = {
        DECODE: Kind(DecodePlan, "mma_sync/decode/decode", frozenset({"o_parts", "lse_parts"}))
    }

    def computes(self, problem: Problem) -> bool:
        return problem.decode

    def refuses(self, problem: Problem) -> Iterator[str]:
        if problem.eight_bit:
            yield "kernels of mma.sync have no queries of 8 bits yet"
        if has_program(problem.scores):
            yield "kernels that split keys have no scores of callables"
        more = problem.bias or problem.attn_mask or problem.dropout
        if more or problem.positions or problem.continues:
            yield "no kernel does all of this together yet"

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        found = super().refusals(problem, target)
        if problem.widens and not target.fp8:
            found.append(f"{target.name} converts nothing from {problem.dtype_kv}")
        return found

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        found = decode.plans(problem, target)
        if not found:
            reason = f"no tile of split keys fits {target.name}'s registers and shared memory"
            raise PlanError(f"{problem.label}: {reason}")
        return found

    def splits(self, reader: KernelEntry, facts: Facts, keys: int) -> int:
        return cost.splits_of(reader, facts, keys)

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from .render import render

        return render(problem, cast(DecodePlan, plan), features, root)

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        reads = cast(DecodePlan, plan)
        what = "columns" if reads.divides_columns else "keys"
        shared = f", {reads.row_tiles} tiles of 16 rows that share keys" * (reads.row_tiles > 1)
        yield (
            f"aims at the memory: {reads.warps} warps with {what} of their own{shared}, "
            f"{reads.stages} stage{'s' if reads.stages > 1 else ''} each; {reads.ctas} "
            f"CTA{'s' if reads.ctas > 1 else ''} an SM"
        )


FAMILY = MmaDecode()
