"""Render, masks of callables: the kernel that makes their bits."""

from __future__ import annotations

from pathlib import Path

from ...fragments.features import Features
from ...spec.problem import Problem
from ..fill import Source, emit_fragment, fill_view
from ..params import describe, mask_names, typed
from ..plan import template_of
from ..uses import uses_of
from ..view import kernel_view
from .mask_make import MakePlan
from .view_mask_make import mask_make_view

GRANULE = 64  # queries and keys of a warp, as in block_map.cuh
AXES = ("batch", "head", "row", "column")
PARTS = ("batches", "heads", "queries", "keys")
BLOCKS = ("mask_block_queries", "mask_block_keys", "mask_blocks_rows", "mask_blocks_columns")
MADE = ("mask_rows", "mask_columns", "mask_row_map", "mask_column_map")


def render(problem: Problem, plan: MakePlan, features: Features, root: Path) -> Source:
    """The source of the kernel that makes the problem's mask.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    (use,) = uses_of(problem, features)["mask"]
    names = [each for name in MADE for each in mask_names(name)]
    names += mask_names("mask_blocks") + typed("ptr", "mask_state")
    names += typed("ptr", "mask_shown") + typed("i64", *(f"mask_shown_stride_{x}" for x in AXES))
    names += typed("i32", *(f"attn_mask_{part}" for part in PARTS), *BLOCKS)
    names += use.parameters
    kernel = describe(
        problem,
        plan,
        names,
        tile_rows=GRANULE,
        grid="multiprocessors",
        workspace=(),
        ctas=plan.ctas,
    )
    template = template_of(plan)
    struct = emit_fragment(root, use.fragment)
    view = mask_make_view(plan, kernel_view(kernel, template), use, struct)
    return Source(fill_view(template, view, root), kernel)
