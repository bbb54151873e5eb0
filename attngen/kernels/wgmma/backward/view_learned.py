"""View, backward: values of the template of the kernel of what a score learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...support.view_parts import Uses, included
from .plan import LearnedPlan
from .view_bias_gradient import COPYING_ARRIVALS
from .view_main import MainView, main_fields, main_headers, whole_score_product


@dataclass(frozen=True, kw_only=True)
class LearnedView(MainView):
    """Values of dlearned.cu.j2. Strings are C++.

    stages, stage_arrivals, boxes: as `BiasGradientView` has them. factor: what gradients of scores
    are multiplied by. loads: of each load that has a gradient, which elements of a tile read the
    same number, as `Reach` names it. exact: whether sums have the same bits in any order.
    """

    stages: int
    stage_arrivals: int
    factor: str
    loads: tuple[str, ...]
    exact: bool
    boxes: str


def learned_view(
    problem: Problem, plan: LearnedPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> LearnedView:
    """Decide what dlearned.cu.j2 renders. uses: its fragments by role."""
    loads = next(use.fragment.reaches for use in uses["score"] if use.fragment.learned)
    return LearnedView(
        **main_fields(problem, plan, kernel, uses, root),
        headers="\n".join([main_headers(problem), included(("learned_sums.cuh", True))]),
        mask_tensor="mask_rows" if problem.attn_mask else "",
        score_product=whole_score_product(problem, plan.tile.n),
        stages=plan.stages,
        stage_arrivals=COPYING_ARRIVALS if problem.gather else 1,
        factor="p.keep_scale" if problem.dropout else "1.f",
        loads=loads,
        exact=problem.deterministic,
        boxes="kBoxes",
    )
