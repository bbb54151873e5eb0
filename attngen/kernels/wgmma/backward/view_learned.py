"""View, backward: values of the template of the kernel of what a score learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ....fragments.names import DIAGONAL
from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...mask_view import pair_mask_view
from ...support.view_parts import Uses, included
from ...uses import hides_past
from .bias_gradient import sums_by_distance
from .plan import LearnedPlan
from .view_bias_gradient import COPYING_ARRIVALS
from .view_main import MainView, main_fields, main_headers, whole_score_product


@dataclass(frozen=True, kw_only=True)
class LearnedView(MainView):
    """Values of dlearned.cu.j2. Strings are C++.

    stages: buffers for keys and values, in turn. stage_arrivals, rows_arrivals: arrivals at the
    barriers of a stage, and of a block's rows, beside bytes. factor: what gradients of scores are
    multiplied by. loads: of each load that has a gradient, which elements of a tile read the
    same number, as `Reach` names it. sums: what adds to them; by_distance: whether it has memory of
    its own, in which a warp sums by distances. lines: the type of lines of keys and distances;
    keeps_lines: whether there are any; learned: the name of the score that learns.
    """

    stages: int
    stage_arrivals: int
    rows_arrivals: int
    factor: str
    loads: tuple[str, ...]
    sums: str
    by_distance: bool
    lines: str
    keeps_lines: bool
    learned: str


def learned_view(
    problem: Problem, plan: LearnedPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> LearnedView:
    """Decide what dlearned.cu.j2 renders. uses: its fragments by role."""
    score = next(use.fragment for use in uses["score"] if use.fragment.learned)
    loads, lines = score.reaches, ", ".join(map(str, score.learned_lines))
    fields = main_fields(problem, plan, kernel, uses, root)
    place = f"LearnedPlace<{hides_past(uses['mask'])}, {lines}>"
    fields["scores"] = replace(fields["scores"], list=replace(fields["scores"].list, place=place))
    headers = included(("learned_sums.cuh", True), ("score_lines.cuh", True))
    return LearnedView(
        **fields,
        headers="\n".join([main_headers(problem), headers]),
        pair_mask=pair_mask_view(problem, uses),
        score_product=whole_score_product(problem, plan.tile.n),
        stages=plan.stages,
        stage_arrivals=COPYING_ARRIVALS // 2 + 1 if problem.gather else 1,
        rows_arrivals=COPYING_ARRIVALS if problem.gather else 1,
        factor="p.keep_scale" if problem.dropout else "1.f",
        loads=loads,
        sums=_sums_of(problem, plan, loads),
        by_distance=sums_by_distance(problem),
        lines=f"ScoreLines<kTileN, {lines}>",
        keeps_lines=any(score.learned_lines),
        learned=score.name,
    )


def _sums_of(problem: Problem, plan: LearnedPlan, loads: tuple[str, ...]) -> str:
    """The C++ type of a warp's sums, exact where these have the same bits in any order."""
    exact = "true" if problem.deterministic else "false"
    if sums_by_distance(problem):
        return f"DistanceSums<{len(loads)}, {exact}, {plan.tile.n}, {loads.index(DIAGONAL)}>"
    return f"LearnedSums<{len(loads)}, {exact}>"
