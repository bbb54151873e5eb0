"""Render, decode by products of warps: the kernel that splits the keys."""

from __future__ import annotations

from pathlib import Path

from ....fragments.features import Features
from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...fill import Source, emit_fragments, fill_view
from ...params import Names, describe, operands_of, strides_of, typed
from ...plan import template_of
from ...support.render_combine import PARTS
from ...uses import uses_of
from ...view import kernel_view
from .plan import DecodePlan
from .view import decode_view

ROLES = ("mask", "score", "softmax", "q_seq", "kv_seq", "kv_iter")
PAGES = ("kv_fetch", "v_fetch")


def render(problem: Problem, plan: DecodePlan, features: Features, root: Path) -> Source:
    """The source of the kernel that reads the keys of the decode `problem` as its plan says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    known = uses_of(problem, features)
    uses = {role: known[role] for role in (*ROLES, *(PAGES if problem.paged else ()))}
    template, fragments = template_of(plan), emit_fragments(root, uses)
    kernel = _describe(problem, plan, operands_of(uses))
    view = decode_view(problem, plan, kernel_view(kernel, template), uses, fragments)
    return Source(fill_view(template, view, root), kernel)


def _describe(problem: Problem, plan: DecodePlan, operands: Names) -> KernelEntry:
    names = typed("ptr", *"qkvo", "lse", *PARTS, *(("max_logit",) if problem.max_logit else ()))
    descales = ("descale_k", "descale_v") if problem.widens else ()
    names += typed("ptr", *descales)
    for tensor in "qkvo":
        names += strides_of(tensor)
    names += typed("i64", "total_rows")
    names += typed("i32", *(f"{x}_stride_{axis}" for x in descales for axis in ("batch", "head")))
    names += typed("i32", *(("k_page_count", "v_page_count") if problem.paged else ()))
    names += typed("i32", "row_tiles", "heads_q", "heads_kv", "group_size", "splits")
    names += typed("i32", "bottom_right", *(("sequences",) if problem.q_seq != "dense" else ()))
    return describe(
        problem,
        plan,
        [*names, ("scale_log2", "f32"), *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        grid="splits",
        workspace=PARTS,
        block_keys=plan.tile.n,
        ctas=plan.ctas,
        busy_ctas=plan.busy_ctas,
        part_floats=problem.head_dim_v,
        q_seq=problem.q_seq,
        kv_seq="dense" if problem.paged else problem.kv_seq,
    )
