"""Render, forward by products of warps: from a problem and its plan to a source and its launch."""

from __future__ import annotations

from pathlib import Path

from ....fragments.features import Features
from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...fill import Source, emit_fragments, fill_view
from ...params import (
    DROP_THRESHOLD,
    Names,
    describe,
    diagonal_names,
    drop_names,
    joined_names,
    joining_names,
    mask_names,
    operands_of,
    strides_of,
    typed,
)
from ...plan import template_of
from ...uses import FragmentUse, uses_of
from .plan import Plan
from .view import forward_view

ROLES = ("mask", "asked", "score", "softmax", "q_seq", "kv_seq", "kv_iter")
PAGES = ("kv_fetch", "v_fetch")
SCALES = (
    *("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o"),
    *("amax_s", "amax_o"),
)


def render(problem: Problem, plan: Plan, features: Features, root: Path) -> Source:
    """The source of the kernel that computes the forward `problem` as `plan` says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    known = uses_of(problem, features)
    roles = (*ROLES, *(PAGES if problem.paged else ()))
    uses = {role: known[role] for role in roles}
    kernel = _describe(problem, plan, uses)
    view = forward_view(problem, plan, uses, kernel, emit_fragments(root, uses))
    return Source(fill_view(template_of(plan), view, root), kernel)


def _describe(problem: Problem, plan: Plan, uses: dict[str, list[FragmentUse]]) -> KernelEntry:
    return describe(
        problem,
        plan,
        _names(problem, uses),
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        grid="tiles",
        workspace=("mask_rows",) if problem.packs_mask else (),
        kv_group_bytes=plan.schedule.kv_group_bytes,
        group_heads=plan.schedule.group_heads,
        tail_share=plan.schedule.tail_share,
        q_seq=problem.q_seq,
        kv_seq="dense" if problem.paged else problem.kv_seq,
        ctas=plan.ctas,
    )


def _names(problem: Problem, uses: dict[str, list[FragmentUse]]) -> Names:
    """Names and types of the parameters: pointers and strides, then 4-byte values."""
    names = typed("ptr", "q", "k", "v", "o", "lse")
    names += typed("ptr", *(("max_logit",) if problem.max_logit else ()))
    names += typed("ptr", *(SCALES if problem.eight_bit else ()))
    names += typed("ptr", *(("descale_k", "descale_v") if problem.widens else ()))
    names += joined_names(problem)
    names += typed("ptr", *(("rng_state",) if problem.dropout else ()))
    for tensor in "qkvo":
        names += strides_of(tensor)
    if problem.gather:
        names += typed("i64", *(f"{tensor}_stride_column" for tensor in "qkv"))
        names += typed("i32", "dim_qk", "dim_v")
    names += typed("i32", *(("k_page_count", "v_page_count") if problem.paged else ()))
    names += joining_names(problem)
    names += mask_names("mask_rows", asked=problem.asks_mask) if problem.attn_mask else []
    names += mask_names("mask_row_map") if problem.listed else []
    counts = ("tiles_m", "heads_q", "total_heads", "heads_per_group", "tail_rows", "group_size")
    names += [*typed("i32", *counts), *diagonal_names(problem), ("scale_log2", "f32")]
    names += typed("i32", *(("sequences",) if problem.varlen else ()))
    for tensor in "qkv" if problem.eight_bit else "kv" if problem.widens else "":
        names += typed("i32", *(f"descale_{tensor}_stride_{axis}" for axis in ("batch", "head")))
    names += typed("i32", *(f"descale_{x}_stride_row" for x in "qkv" if problem.token_scales))
    names += drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))
    return [*names, *operands_of(uses)]
