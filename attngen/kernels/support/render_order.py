"""Render, variable lengths: the kernel that orders many sequences before the others."""

from __future__ import annotations

from pathlib import Path

from ...fragments.features import Features
from ...runtime.program import Workspace
from ...spec.problem import Problem
from ..fill import Source, emit_fragments, fill_view
from ..params import describe, operands_of, strides_of, typed
from ..plan import template_of
from ..uses import uses_of
from ..view import kernel_view
from .order import VarlenPlan
from .view_order import fills_output, order_view


def render(problem: Problem, plan: VarlenPlan, features: Features, root: Path) -> Source:
    """The source of the kernel that orders the sequences, and may fill what belongs to none.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    uses = {role: use for role, use in uses_of(problem, features).items() if role.endswith("_seq")}
    schedules: tuple[Workspace, ...] = ("q_schedule",) if plan.q else ()
    schedules += ("kv_schedule",) if plan.kv else ()
    names = typed("ptr", *schedules)
    if fills_output(problem, plan):
        names += [*typed("ptr", "o", "lse"), *strides_of("o")]
    names += typed("i32", "sequences", "heads_q", "heads_kv", "group_size", "kept")
    if plan.kv and plan.kv.follows:
        names += typed("i32", "window_left", "window_right")
    kernel = describe(
        problem,
        plan,
        [*names, *operands_of(uses)],
        tile_rows=1,
        grid="multiprocessors" if plan.fills else "one",
        workspace=schedules,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )
    template = template_of(plan)
    fragments = emit_fragments(root, uses)
    view = order_view(problem, plan, kernel_view(kernel, template), uses, fragments)
    return Source(fill_view(template, view, root), kernel)
