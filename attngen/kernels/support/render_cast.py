"""Render, casts: the parameters of their kernels, and their sources."""

from __future__ import annotations

from pathlib import Path

from ...runtime.program import Grid
from ...spec.problem import Problem
from ..fill import Source, fill_view
from ..params import Names, describe, typed
from ..plan import template_of
from ..view import kernel_view
from .cast import D_O_LARGEST, D_O_STORE, NEXT_SCALES, ROWS, STORE, TENSORS, CastPlan
from .view_cast import cast_view


def render(problem: Problem, plan: CastPlan, root: Path) -> Source:
    """The source of one of the kernels that cast the problem's dtypes.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    grid: Grid = "one" if plan.family == NEXT_SCALES else "multiprocessors"
    names = _names(plan.family)
    kernel = describe(problem, plan, names, tile_rows=1, grid=grid, workspace=())
    template = template_of(plan)
    view = cast_view(problem, plan, kernel_view(kernel, template))
    return Source(fill_view(template, view, root), kernel)


def _names(family: str) -> Names:
    """The parameters of a kernel."""
    if family == NEXT_SCALES:
        numbers = ("steps", "columns", "own", "of_all", "power_of_two")
        return [*typed("ptr", "scale", "history"), ("share", "f32"), *typed("i32", *numbers)]
    if family in (D_O_LARGEST, D_O_STORE):
        return _names_of_gradient(family == D_O_STORE)
    if family == ROWS:
        names = typed("ptr", *_each("from"), *_each("to"), "amax", "scale", "descale")
        names += [*typed("f32", "least", "share"), *typed("i64", *_each("count"))]
        return names + typed("i32", *_each("row"), "power_of_two")
    stores = family == STORE
    names = typed("ptr", *_each("from"), *_each("to" if stores else "used"), "parts")
    if stores:
        names += _scale_names()
    names += typed("i64", *_each("count"))
    return names + typed("i32", *(("power_of_two", "tensors") if stores else _each("row")))


def _names_of_gradient(stores: bool) -> Names:
    """The parameters of a kernel that casts dO."""
    if not stores:
        names = typed("ptr", "from_0", "used_0", "parts", "v", "used_v")
        return [*names, *typed("i64", "count_0", "count_v"), *typed("i32", "row_0", "row_v")]
    names = typed("ptr", "from_0", "to_0", "parts", "descale_v", "of_lse", "noted", "scale_dp")
    names += [*typed("ptr", "descale_dp"), *_scale_names(), *typed("f32", "ds_bound", "of_softmax")]
    names += typed("i64", "count_0", "count_v")
    return names + typed("i32", "power_of_two", "mantissa_v")


def _scale_names() -> Names:
    """The parameters of scales, and of the rule by which they follow."""
    return [*typed("ptr", "known", "amax", "scale", "descale"), *typed("f32", "least", "share")]


def _each(name: str) -> tuple[str, ...]:
    """A parameter of each tensor."""
    return tuple(f"{name}_{n}" for n in range(TENSORS))
