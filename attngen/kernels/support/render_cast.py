"""Render, casts: the parameters of the two kernels, and their sources."""

from __future__ import annotations

from pathlib import Path

from ...runtime.program import KernelEntry
from ...spec.problem import Problem
from ..fill import Source, fill_view
from ..params import describe, typed
from ..plan import template_of
from ..view import kernel_view
from .cast import STORE, TENSORS, CastPlan
from .view_cast import cast_view


def render(problem: Problem, plan: CastPlan, root: Path) -> Source:
    """The source of one of the kernels that cast the problem's dtypes.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    kernel = _describe(problem, plan)
    template = template_of(plan)
    view = cast_view(problem, plan, kernel_view(kernel, template))
    return Source(fill_view(template, view, root), kernel)


def _describe(problem: Problem, plan: CastPlan) -> KernelEntry:
    stores = plan.family == STORE
    names = typed("ptr", *_each("from"), *_each("to" if stores else "used"), "parts")
    if stores:
        names += typed("ptr", "known", "amax", "scale", "descale")
        names += typed("f32", "least", "share")
    names += typed("i64", *_each("count"))
    names += typed("i32", *(("power_of_two", "tensors") if stores else _each("row")))
    return describe(problem, plan, names, tile_rows=1, grid="multiprocessors", workspace=())


def _each(name: str) -> tuple[str, ...]:
    """A parameter of each tensor."""
    return tuple(f"{name}_{n}" for n in range(TENSORS))
