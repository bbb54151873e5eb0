"""The family of what runs before kernels of any other: packed masks, the order of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...fragments.features import Features
from ...spec.problem import Problem
from ...targets.target import Target
from ..base import KernelPlan
from ..family import Family, Kind
from . import mask_pack, order

if TYPE_CHECKING:
    from ..fill import Source


class Support(Family):
    """Kernels of no architecture that write what others read."""

    kernels = {
        mask_pack.NAME: Kind(
            mask_pack.MaskPlan, "support/mask_pack", frozenset({"mask_rows", "mask_columns"})
        ),
        order.NAME: Kind(
            order.VarlenPlan, "support/order", frozenset({"q_schedule", "kv_schedule"})
        ),
    }

    def surround(
        self, problem: Problem, target: Target, found: Sequence[KernelPlan]
    ) -> tuple[KernelPlan, ...]:
        if problem.attn_mask:
            found = mask_pack.with_mask(found, target)
        if problem.varlen and not problem.decode:
            found = order.with_order(found, target)
        return tuple(found)

    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        from . import render_mask_pack, render_order

        if plan.family == mask_pack.NAME:
            return render_mask_pack.render(problem, cast(mask_pack.MaskPlan, plan), root)
        return render_order.render(problem, cast(order.VarlenPlan, plan), features, root)


FAMILY = Support()
