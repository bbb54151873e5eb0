"""Render, forward: from a problem and its plan to a source and the description of its launch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from ....fragments.features import Features
from ....runtime.program import TensorMapRecipe
from ....spec.problem import Problem
from ...fill import Source, emit_fragments, fill_view
from ...params import (
    DROP_LIMIT,
    DROP_THRESHOLD,
    Names,
    bias_maps,
    describe,
    diagonal_names,
    drop_names,
    joined_names,
    joining_names,
    map_type,
    mask_names,
    operand_names,
    operands_of,
    recipe,
    strides_of,
    typed,
)
from ...plan import template_of
from ...uses import FragmentUse, uses_of
from .plan import Plan
from .traits import starts_early
from .view import forward_view


def render(problem: Problem, plan: Plan, features: Features, root: Path) -> Source:
    """The source of the kernel that computes the forward `problem` as `plan` says.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    uses = uses_of(problem, features)
    kernel = describe(
        problem,
        plan,
        _names(problem, plan, uses),
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        tensor_maps=_tensor_maps(problem, plan),
        grid="persistent_pairs" if plan.pairs else "persistent_tiles",
        workspace=(
            *(("tile_counter",) if plan.schedule.dynamic else ()),
            *(("q_schedule",) if problem.varlen else ()),
            *(("mask_rows",) if problem.packs_mask else ()),
        ),
        kv_group_bytes=plan.schedule.kv_group_bytes,
        group_heads=plan.schedule.group_heads,
        tail_share=plan.schedule.tail_share,
        q_seq=problem.q_seq,
        kv_seq="dense" if problem.paged else problem.kv_seq,  # its maps find pages
        dependent=starts_early(problem, plan) and not _reads_before_waiting(problem, uses),
        orders_few=plan.orders_few,
        no_lse=plan.sums_stored,
        ctas=plan.ctas,
    )
    view = forward_view(problem, plan, uses, kernel, emit_fragments(root, uses))
    return Source(fill_view(template_of(plan), view, root), kernel)


def _reads_before_waiting(problem: Problem, uses: dict[str, list[FragmentUse]]) -> bool:
    """Whether masks read numbers of sequences where a tile's blocks are found, which in dense
    kernels is before the wait: whoever is in front may still be writing them."""
    return not problem.varlen and any(use.fragment.reads_sequences for use in uses["mask"])


def _names(problem: Problem, plan: Plan, uses: dict[str, list[FragmentUse]]) -> Names:
    """Names and types of the parameters: tensor maps, pointers and strides, then 4-byte values."""
    names = operand_names(problem, "q", "k", "v")
    # Where rows of no sequence are filled, too.
    addressed = plan.stores_rows or (plan.orders_few and problem.q_seq != "dense")
    # Scores that outgrow float32 are made anew where no maximum was looked for.
    remakes = problem.eight_bit and plan.pipeline.consumers == 3 and problem.masks
    names += [] if plan.stores_rows else [("map_o", map_type(problem, "o"))]
    names += [("o", "ptr")] if addressed else []
    names += typed("ptr", "q", "k") if remakes else []
    names += [("map_bias", "tensor_map")] if problem.bias else []
    names += [("lse", "ptr")]
    names += joined_names(problem)
    names += [("max_logit", "ptr")] if problem.max_logit else []
    if problem.eight_bit:
        pointers = ("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o")
        names += [(name, "ptr") for name in (*pointers, "amax_s", "amax_o")]
    if problem.widens:
        names += typed("ptr", "descale_k", "descale_v")
    names += [("rng_state", "ptr")] if problem.dropout else []
    names += mask_names("mask_rows", asked=problem.asks_mask) if problem.attn_mask else []
    names += mask_names("mask_row_map") if problem.listed else []
    names += [("tile_counter", "ptr")] if plan.schedule.dynamic else []
    names += [("q_schedule", "ptr")] if problem.varlen else []
    names += strides_of("o") if addressed else []
    names += [*strides_of("q"), *strides_of("k")] if remakes else []
    names += typed("i32", "dim_qk", "dim_v") if problem.gather else []
    names += joining_names(problem)
    names += [
        ("tiles", "i32"),
        ("tiles_m", "i32"),
        ("heads_q", "i32"),
        ("total_heads", "i32"),
        ("heads_per_group", "i32"),
        ("tail_rows", "i32"),
        ("group_size", "i32"),
        *diagonal_names(problem),
        ("scale_log2", "f32"),
    ]
    names += [("sequences", "i32")] if problem.varlen else []
    if problem.eight_bit or problem.widens:
        scaled = "kv" if problem.widens else "qkv"
        for tensor, axis in itertools.product(scaled, ("batch", "head")):
            names += [(f"descale_{tensor}_stride_{axis}", "i32")]
    names += typed("i32", *(f"descale_{x}_stride_row" for x in "qkv" if problem.token_scales))
    limit = DROP_THRESHOLD if problem.eight_bit else DROP_LIMIT
    names += drop_names(problem, *limit, ("keep_scale", "f32"))
    return [*names, *operands_of(uses)]


def _tensor_maps(problem: Problem, plan: Plan) -> tuple[TensorMapRecipe, ...]:
    """Q, O and a bias move in boxes of a warpgroup's 64 rows, K and V in blocks, or in parts."""
    bias = tuple(replace(x, box_rows=64) for x in bias_maps(problem))
    if problem.gather:
        return bias
    raw_keys = plan.pipeline.raw_keys or plan.tile.n
    rows = {"q": 64, "k": raw_keys if problem.widens else plan.tile.n, "v": raw_keys}
    dtypes = {"q": problem.dtype_q, "k": problem.dtype_kv, "v": problem.dtype_kv}
    if not plan.stores_rows:
        rows["o"], dtypes["o"] = 64, problem.dtype_o
    pages = ("k", "v") if problem.paged else ()
    operands = (
        replace(recipe(x, dtypes[x], rows[x]), l2_bytes=128, paged=x in pages) for x in rows
    )
    return (*operands, *bias)
