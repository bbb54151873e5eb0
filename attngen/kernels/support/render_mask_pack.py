"""Render, arbitrary masks: the kernel that packs their bits."""

from __future__ import annotations

from pathlib import Path

from ...runtime.program import Workspace
from ...spec.problem import Problem
from ..fill import Source, fill_view
from ..params import describe, mask_names, typed
from ..plan import template_of
from ..view import kernel_view
from .mask_pack import MaskPlan
from .view_mask_pack import mask_pack_view

BLOCK = 128  # keys that a warp packs at a time
AXES = ("batch", "head", "row", "column")
PARTS = ("batches", "heads", "queries", "keys")


def render(problem: Problem, plan: MaskPlan, root: Path) -> Source:
    """The source of the kernel that packs the mask as the plan says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    packed: tuple[Workspace, ...] = ("mask_rows",) if plan.rows else ()
    packed += ("mask_columns",) if plan.columns else ()
    names = typed("ptr", "attn_mask")
    names += typed("i64", *(f"attn_mask_stride_{axis}" for axis in AXES))
    for name in packed:
        names += mask_names(name)
    names += typed("i32", *(f"attn_mask_{part}" for part in PARTS))
    kernel = describe(
        problem,
        plan,
        names,
        tile_rows=BLOCK,
        grid="multiprocessors",
        workspace=packed,
    )
    template = template_of(plan)
    view = mask_pack_view(plan, kernel_view(kernel, template))
    return Source(fill_view(template, view, root), kernel)
