"""View: what the template of a learned score's gradients by products of warps reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...support.view_parts import Uses, included
from ...uses import hides_past
from .plan import LearnedPlan
from .view_rows import RowsView, headers_of, rows_fields


@dataclass(frozen=True, kw_only=True)
class MmaLearnedView(RowsView):
    """All that the template of a learned score's gradients names. Strings are C++.

    one_stage: whether the next keys are copied once nobody reads those at hand. loads: of each load
    that has a gradient, which elements of a tile read the same number, as `Reach` names it. exact:
    whether sums have the same bits in any order. keeps_lines, lines, by_distance, learned: as
    Hopper's kernel has them; here there are no lines, and no sums by distances.
    """

    one_stage: bool
    loads: tuple[str, ...]
    exact: bool
    keeps_lines: bool = False
    lines: str = ""
    by_distance: bool = False
    learned: str = ""


def learned_view(
    problem: Problem, plan: LearnedPlan, uses: Uses, kernel: KernelEntry, root: Path
) -> MmaLearnedView:
    """The view of the kernel of what a score of `problem` learns, as `plan` says.

    uses: its fragments by role. kernel: its launch description. root: the templates' directory.
    """
    fields = rows_fields(problem, plan, uses, kernel, root)
    place = f"LearnedPlace<{hides_past(uses['mask'])}, 0, 0>"
    fields["scores"] = replace(fields["scores"], list=replace(fields["scores"].list, place=place))
    headers = included(("learned_sums.cuh", True), ("score_lines.cuh", True))
    return MmaLearnedView(
        **fields,
        headers="\n".join([headers_of(problem), headers]),
        factor="p.keep_scale" if problem.dropout else "1.f",
        one_stage=plan.stages == 1,
        loads=next(use.fragment.reaches for use in uses["score"] if use.fragment.learned),
        exact=problem.deterministic,
    )
