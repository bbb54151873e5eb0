"""Render, gradient of a bias by products of warps: its source and its launch."""

from __future__ import annotations

from pathlib import Path

from ....fragments.features import Features
from ....runtime.program import KernelEntry, Workspace
from ....spec.problem import Problem
from ...fill import Source, fill_view
from ...params import (
    DROP_THRESHOLD,
    Names,
    describe,
    diagonal_names,
    drop_names,
    mask_names,
    operands_of,
    strides_of,
    typed,
)
from ...plan import template_of
from ...uses import uses_of
from .plan import ROW_BLOCK, BiasPlan
from .render import OPERANDS, ROLES, column_names
from .view_bias import bias_view

WORKSPACE: tuple[Workspace, ...] = ("lse_log2", "d", "row_sums")


def render(problem: Problem, plan: BiasPlan, features: Features, root: Path) -> Source:
    """The source of the kernel that makes the gradient of the bias of `problem` as `plan` says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    known = uses_of(problem, features)
    uses = {role: known[role] for role in ROLES}
    kernel = _describe(problem, plan, operands_of(uses))
    view = bias_view(problem, plan, uses, kernel, root)
    return Source(fill_view(template_of(plan), view, root), kernel)


def _describe(problem: Problem, plan: BiasPlan, operands: Names) -> KernelEntry:
    return describe(
        problem,
        plan,
        [*_names(problem), *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        grid="multiprocessors",
        workspace=(*WORKSPACE, *(("mask_rows",) if problem.packs_mask else ())),
        row_block=ROW_BLOCK,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )


def _names(problem: Problem) -> Names:
    """Names and types of the parameters but those that fragments read."""
    rng = ("rng_state",) if problem.dropout else ()
    names = typed("ptr", *OPERANDS, *WORKSPACE, "lse", "dbias", *rng)
    for tensor in OPERANDS:
        names += strides_of(tensor)
    names += column_names(problem)
    names += mask_names("mask_rows", asked=problem.asks_mask) if problem.attn_mask else []
    sizes = (f"dbias_{name}" for name in ("batches", "heads", "rows", "columns", "sums_rows"))
    places = ("sequences", "heads_q", "q_blocks", "group_size")
    names += [*typed("i32", *sizes, *places), *diagonal_names(problem)]
    names += typed("f32", "scale", "scale_log2")
    return [*names, *drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))]
