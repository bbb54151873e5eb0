"""Render, backward by products of warps: from a problem and its plan to a source and its launch."""

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
from .choices import dq_columns
from .plan import ROW_BLOCK, Plan
from .view import backward_view

ROLES = ("mask", "asked", "score", "q_seq", "kv_seq", "kv_iter")
OPERANDS = ("q", "k", "v", "d_o")
COUNTS = (
    *("kv_blocks", "q_blocks", "heads_q", "heads_kv", "total_heads", "heads_per_group"),
    *("tail_rows", "group_size"),
)


def render(problem: Problem, plan: Plan, features: Features, root: Path) -> Source:
    """The source of the kernel that computes the backward `problem` as `plan` says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    known = uses_of(problem, features)
    uses = {role: known[role] for role in ROLES}
    kernel = _describe(problem, plan, operands_of(uses))
    view = backward_view(problem, plan, uses, kernel, root)
    return Source(fill_view(template_of(plan), view, root), kernel)


def _describe(problem: Problem, plan: Plan, operands: Names) -> KernelEntry:
    workspace: tuple[Workspace, ...] = ("lse_log2", "d", "dq_acc")
    workspace += ("tile_counter", "turns") if plan.deterministic else ()
    workspace += ("row_sums",) if problem.bias else ()
    return describe(
        problem,
        plan,
        [*_names(problem, workspace), *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.n,
        grid="tiles",
        workspace=(*workspace, "dq_added", *(("mask_columns",) if problem.packs_mask else ())),
        kv_group_bytes=plan.schedule.kv_group_bytes,
        group_heads=plan.schedule.group_heads,
        tail_share=plan.schedule.tail_share,
        tile_axis="kv",
        row_block=ROW_BLOCK,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        dq_floats=ROW_BLOCK * dq_columns(problem),
        ctas=plan.ctas,
    )


def _names(problem: Problem, workspace: tuple[Workspace, ...]) -> Names:
    """Names and types of the parameters but those that fragments read: pointers and strides, then
    4-byte values."""
    tensors: tuple[str, ...] = (*OPERANDS, "dk", "dv")
    tensors += ("dq",) if problem.q_seq != "dense" else ()
    beside = (*(("lse",) if problem.bias else ()), *(("rng_state",) if problem.dropout else ()))
    names = typed("ptr", *tensors, *workspace, *beside)
    for tensor in tensors:
        names += strides_of(tensor)
    names += column_names(problem)
    names += mask_names("mask_columns", asked=problem.asks_mask) if problem.attn_mask else []
    for name in block_maps(problem):
        names += mask_names(name)
    names += [*typed("i32", *COUNTS), *diagonal_names(problem)]
    names += typed("i32", *(("sequences",) if problem.varlen else ()))
    names += typed("f32", "scale", "scale_log2")
    return [*names, *drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))]


def block_maps(problem: Problem) -> tuple[str, ...]:
    """The maps that tiles of keys read of a mask made before: of the queries that see them, and of
    the keys that queries see, by which these count who adds to dQ before."""
    if not problem.listed:
        return ()
    return ("mask_column_map", *(("mask_row_map",) if problem.deterministic else ()))


def column_names(problem: Problem) -> Names:
    """The parameters of columns that may lie apart."""
    if not problem.gather:
        return []
    strides = typed("i64", *(f"{tensor}_stride_column" for tensor in OPERANDS))
    return [*strides, *typed("i32", "dim_qk", "dim_v")]
