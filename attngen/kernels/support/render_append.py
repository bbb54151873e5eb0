"""Render, appending: the parameters of the kernel that writes to a cache, and its source."""

from __future__ import annotations

from pathlib import Path

from ...runtime.program import KernelEntry
from ...spec.problem import Problem
from ..fill import Source, fill_view
from ..params import describe, strides_of, typed
from ..plan import template_of
from ..view import kernel_view
from .append import AppendPlan
from .view_append import append_view

CACHES = ("k_cache", "v_cache")
POINTERS = ("lengths", "cu_seqlens", "cu_seqlens_all", "page_table")
NUMBERS = ("q_len", "sequences", "heads_kv", "packed", "page_size", "pages", "table_columns")
OF_QUERIES = ("turned_heads", "turned_step")
ROTARY = ("rotary_dim", "rotary_rows", "rotary_pairs", "rotary_wide")


def render(problem: Problem, plan: AppendPlan, root: Path) -> Source:
    """The source of the kernel that appends tokens of the problem's dtypes and head dims.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    kernel = _describe(problem, plan)
    template = template_of(plan)
    view = append_view(problem, plan, kernel_view(kernel, template))
    return Source(fill_view(template, view, root), kernel)


def _describe(problem: Problem, plan: AppendPlan) -> KernelEntry:
    tensors = ("k", "v", *CACHES)
    names = typed("ptr", *tensors, *POINTERS)
    for tensor in tensors:
        names += strides_of(tensor)
    names += [*typed("i64", "total_rows", "table_stride"), *typed("i32", *NUMBERS)]
    if problem.dtype_q != problem.dtype_kv:
        scales = ("scale_k", "scale_v")
        names += typed("ptr", *scales)
        names += typed("i32", *(f"{x}_stride_{axis}" for x in scales for axis in ("batch", "head")))
    if not problem.eight_bit:
        names += typed("ptr", "q", "o", "rotary_cos", "rotary_sin")
        names += [*strides_of("q"), *strides_of("o"), *typed("i32", *OF_QUERIES, *ROTARY)]
    # Of tiles there are none; the axis says that heads of keys may be more than the rows' one.
    return describe(
        problem, plan, names, tile_rows=plan.warps, grid="rows", workspace=(), tile_axis="kv"
    )
