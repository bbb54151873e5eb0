"""Render, combining: the kernel that joins the parts of an output."""

from __future__ import annotations

from pathlib import Path

from ...fragments.features import Features
from ...runtime.program import KernelEntry, Workspace
from ...spec.problem import Problem
from ..fill import Source, emit_fragments, fill_view
from ..params import Names, describe, operands_of, strides_of, typed
from ..plan import template_of
from ..uses import uses_of
from ..view import kernel_view
from .combine import CombinePlan
from .view_combine import combine_view

PARTS: tuple[Workspace, ...] = ("o_parts", "lse_parts")


def render(problem: Problem, plan: CombinePlan, features: Features, root: Path) -> Source:
    """The source of the kernel that joins the parts of `problem` as its plan says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    uses = {"softmax": uses_of(problem, features)["softmax"]}
    template, fragments = template_of(plan), emit_fragments(root, uses)
    kernel = _describe(problem, plan, operands_of(uses))
    view = combine_view(problem, plan, kernel_view(kernel, template), uses, fragments)
    return Source(fill_view(template, view, root), kernel)


def _describe(problem: Problem, plan: CombinePlan, operands: Names) -> KernelEntry:
    names = [*typed("ptr", *PARTS, "o", "lse"), *strides_of("o"), ("total_rows", "i64")]
    names += typed("i32", "q_len", "heads_q", "splits")
    return describe(
        problem,
        plan,
        [*names, *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=1,
        grid="rows",
        ctas=plan.ctas,
        workspace=PARTS,
        part_floats=problem.head_dim_v,
        dependent=plan.is_dependent,
    )
