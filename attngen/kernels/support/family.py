"""The family of what runs around kernels of any other: packed masks, the order of sequences, D and
LSE before a backward and the rounding of sums after it; and of what comes before a call, the append
to a cache, casts to 8 bits and masks of callables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...fragments.features import Features
from ...spec.problem import DTYPE_BYTES, Problem
from ...targets.target import Target
from ..base import KernelPlan
from ..family import Family, Kind
from . import append, mask_make, mask_pack, order
from .around import (
    CLEAR,
    CONVERT,
    PREPARE,
    ROW_SUMS,
    AroundPlan,
    ClearPlan,
    ConvertPlan,
    PreparePlan,
    RowSumsPlan,
)
from .cast import NAMES, CastPlan, cast_plans

if TYPE_CHECKING:
    from ..fill import Source

CASTS = ("cast", "bwd_cast")
MASK = "mask"
ROWS = frozenset({"lse_log2", "d", "turns"})
AROUND = {
    PREPARE: Kind(PreparePlan, "support/prepare", ROWS, frozenset({"dq"})),
    CLEAR: Kind(ClearPlan, "support/prepare", ROWS | {"dq_acc"}, frozenset({"dq"})),
    CONVERT: Kind(
        ConvertPlan, "support/convert", frozenset({"dq", "dlearned"}), frozenset({"dk", "dv"})
    ),
    ROW_SUMS: Kind(RowSumsPlan, "support/row_sums", frozenset({"row_sums"})),
}


class Support(Family):
    """Kernels of no architecture that write what others read."""

    kernels = {
        append.NAME: Kind(append.AppendPlan, "support/append"),
        **{name: Kind(CastPlan, f"support/{name}") for name in NAMES},
        mask_make.NAME: Kind(mask_make.MakePlan, "support/mask_make"),
        mask_pack.NAME: Kind(
            mask_pack.MaskPlan, "support/mask_pack", frozenset({"mask_rows", "mask_columns"})
        ),
        order.NAME: Kind(
            order.VarlenPlan, "support/order", frozenset({"q_schedule", "kv_schedule"})
        ),
        **AROUND,
    }

    def computes(self, problem: Problem) -> bool:
        return problem.direction in ("append", MASK, *CASTS)

    def refuses(self, problem: Problem) -> Iterator[str]:
        sizes = DTYPE_BYTES[problem.dtype_q], DTYPE_BYTES[problem.dtype_kv]
        if problem.direction in CASTS and sizes != (2, 1):
            yield f"casts are of 16 bits to 8; got {problem.dtype_q} to {problem.dtype_kv}"
        elif problem.dtype_q != problem.dtype_kv and sizes != (2, 1):
            yield f"{problem.dtype_q} tokens are stored as they are, or in 8 bits from 16"

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        found = super().refusals(problem, target)
        if DTYPE_BYTES[problem.dtype_kv] == 1 and not target.fp8:
            found.append(f"{target.name} converts nothing to {problem.dtype_kv}")
        return found

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        if problem.direction in CASTS:
            return cast_plans(problem, target)
        if problem.direction == MASK:
            return (mask_make.make_plan(target),)
        return (append.append_plan(target),)

    def surround(
        self, problem: Problem, target: Target, found: Sequence[KernelPlan]
    ) -> tuple[KernelPlan, ...]:
        if problem.packs_mask:
            found = mask_pack.with_mask(found, target)
        if problem.varlen and not problem.decode:
            found = order.with_order(found, target)
        return tuple(found)

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from . import (
            render_append,
            render_around,
            render_cast,
            render_mask_make,
            render_mask_pack,
            render_order,
        )

        if plan.family in AROUND:
            return render_around.render(problem, cast(AroundPlan, plan), features, root)
        if plan.family == append.NAME:
            return render_append.render(problem, cast(append.AppendPlan, plan), root)
        if plan.family in NAMES:
            return render_cast.render(problem, cast(CastPlan, plan), root)
        if plan.family == mask_make.NAME:
            return render_mask_make.render(problem, cast(mask_make.MakePlan, plan), features, root)
        if plan.family == mask_pack.NAME:
            return render_mask_pack.render(problem, cast(mask_pack.MaskPlan, plan), root)
        return render_order.render(problem, cast(order.VarlenPlan, plan), features, root)


FAMILY = Support()
