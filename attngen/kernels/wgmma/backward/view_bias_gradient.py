"""View, backward: values of the template of the kernel that makes the gradient of a bias."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from .plan import BiasGradientPlan
from .view_main import MainView, main_fields, main_headers, score_product
from .view_parts import Uses

COPYING_ARRIVALS = 65  # two copies by a warp, and what its first lane announces


@dataclass(frozen=True, kw_only=True)
class BiasGradientView(MainView):
    """Values of dbias.cu.j2. Strings are C++.

    stages: buffers for queries with keys, and for output gradients with values, in turn.
    stage_arrivals: arrivals at the barrier of a stage, beside bytes. sloped: whether weights are
    times derivatives of scores: a bias inside a score that bends has dS times the derivatives of
    what comes after it for its gradient, one that is added last dS itself. factor: what sums are
    multiplied by.
    """

    stages: int
    stage_arrivals: int
    sloped: bool
    factor: str


def bias_gradient_view(
    problem: Problem, plan: BiasGradientPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> BiasGradientView:
    """Decide what dbias.cu.j2 renders. uses: its fragments by role."""
    fields = main_fields(problem, plan, kernel, uses, root)
    before_scale = "pre_scale_bias" in problem.scores
    scale = "p.scale" if before_scale else "1.f"
    return BiasGradientView(
        **fields,
        headers=main_headers(problem),
        mask_tensor="mask_rows" if problem.attn_mask else "",
        score_product=score_product(problem, plan.tile.n),
        stages=plan.stages,
        stage_arrivals=COPYING_ARRIVALS if problem.gather else 1,
        sloped=before_scale and fields["scores"].bend,
        factor=f"{scale} * p.keep_scale" if problem.dropout else scale,
    )
