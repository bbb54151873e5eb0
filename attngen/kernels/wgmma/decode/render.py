"""Render, decode: the kernel that splits the keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ....fragments.features import Features
from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...fill import Source, emit_fragments, fill_view
from ...params import Names, describe, operands_of, recipe, strides_of, typed
from ...plan import template_of
from ...support.render_combine import PARTS
from ...uses import uses_of
from ...view import kernel_view
from .plan import DecodePlan
from .view import decode_view

ROLES = (
    *("mask", "score", "softmax", "q_seq", "kv_seq"),
    *("kv_fetch", "v_fetch", "kv_iter"),
)
# What L2 fetches at a time: 256 bytes, as for tiles that are read again, cost 9 % (measured).
STREAM_L2_BYTES = 128


def render(problem: Problem, plan: DecodePlan, features: Features, root: Path) -> Source:
    """The source of the kernel that reads the keys of the decode `problem` as its plan says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    known = uses_of(problem, features)
    uses = {role: known[role] for role in ROLES}
    template, fragments = template_of(plan), emit_fragments(root, uses)
    kernel = _describe(problem, plan, operands_of(uses))
    view = decode_view(problem, plan, kernel_view(kernel, template), uses, fragments)
    return Source(fill_view(template, view, root), kernel)


def _describe(problem: Problem, plan: DecodePlan, operands: Names) -> KernelEntry:
    maps = tuple(
        dataclasses.replace(
            recipe(tensor, problem.dtype_kv, plan.tile.n),
            paged=problem.paged,
            l2_bytes=STREAM_L2_BYTES,
        )
        for tensor in ("k", "v")
    )
    names = typed("page_map" if problem.paged else "tensor_map", *(each.field for each in maps))
    names += typed("ptr", "q", "o", "lse", *PARTS, *(("max_logit",) if problem.max_logit else ()))
    descales = ("descale_k", "descale_v") if problem.widens else ()
    names += typed("ptr", *descales)
    names += [*strides_of("q"), *strides_of("o"), ("total_rows", "i64")]
    names += typed("i32", *(f"{x}_stride_{axis}" for x in descales for axis in ("batch", "head")))
    names += typed("i32", "row_tiles", "heads_q", "heads_kv", "group_size", "splits")
    names += typed("i32", "bottom_right", *(("sequences",) if problem.q_seq != "dense" else ()))
    return describe(
        problem,
        plan,
        [*names, ("scale_log2", "f32"), *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        tensor_maps=maps,
        grid="splits",
        workspace=PARTS,
        block_keys=plan.tile.n,
        ctas=plan.ctas,
        busy_ctas=plan.busy_ctas,
        part_floats=problem.head_dim_v,
        q_seq=problem.q_seq,
    )
