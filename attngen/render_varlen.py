"""Render, variable lengths: the kernel that runs before the others."""

from __future__ import annotations

from pathlib import Path

from .arch.sm90_varlen import VarlenPlan
from .features import Features
from .problem import Problem
from .program import Workspace
from .render import (
    Source,
    describe,
    fill,
    operands_of,
    strides_of,
    typed,
    uses_of,
)


def render(problem: Problem, plan: VarlenPlan, features: Features, root: Path) -> Source:
    """The source of the kernel that orders the sequences and fills what belongs to none.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    uses = {role: use for role, use in uses_of(problem, features).items() if role.endswith("_seq")}
    schedules: tuple[Workspace, ...] = ("q_schedule",) if plan.q else ()
    schedules += ("kv_schedule",) if plan.kv else ()
    filled = ("o",) if problem.direction == "fwd" else ("dq", "dk", "dv")
    pointers = (*schedules, *filled, *(("lse",) if problem.direction == "fwd" else ()))
    names = typed("ptr", *pointers)
    for tensor in filled:
        names += strides_of(tensor)
    names += typed("i32", "sequences", "heads_q", "heads_kv", "group_size", "kept")
    names += typed("i32", "dim_qk", "dim_v") if problem.gather else []
    kernel = describe(
        problem,
        plan,
        [*names, *operands_of(uses)],
        tile_rows=1,
        grid="multiprocessors",
        workspace=schedules,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )
    return Source(fill(problem, plan, kernel, uses, root), kernel)
