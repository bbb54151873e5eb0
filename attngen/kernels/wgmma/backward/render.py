"""Render, backward: each kernel of a backward to its source and the description of its launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ....fragments.features import Features
from ....runtime.program import KernelEntry, TensorMapRecipe, Workspace
from ....spec.problem import Problem
from ...fill import Source, fill_view
from ...params import (
    DROP_THRESHOLD,
    Names,
    bias_maps,
    describe,
    diagonal_names,
    drop_names,
    mask_names,
    operand_names,
    operands_of,
    recipe,
    strides_of,
    typed,
)
from ...plan import template_of
from ...uses import uses_of
from .bias_gradient import sums_keys
from .fp8_render import view_of as fp8_view_of
from .kept import dq_parts
from .plan import (
    FUSED,
    OF_KEPT,
    OF_KEYS,
    OF_QUERIES,
    AnyPlan,
    BackwardPlan,
    BiasGradientPlan,
    LearnedPlan,
)
from .view import dkv_view, dq_view
from .view_bias_gradient import bias_gradient_view
from .view_fused import fused_view
from .view_kept import kept_view
from .view_learned import learned_view
from .view_main import block_maps

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STORE_ROWS = 64  # gradients leave in boxes of one warpgroup's rows
# Those of a forward that its backward shares.
ROLES = ("mask", "asked", "score", "q_seq", "kv_seq", "kv_fetch")
MAIN_VIEWS: dict[str, Callable[..., DataclassInstance]] = {
    **dict.fromkeys(FUSED, fused_view),
    OF_KEYS: dkv_view,
    OF_QUERIES: dq_view,
    OF_KEPT: kept_view,
}
INTEGERS = (
    *("tiles", "q_blocks", "heads_q", "heads_kv", "total_heads", "heads_per_group"),
    *("tail_rows", "group_size"),
)


def render(problem: Problem, plan: AnyPlan, features: Features, root: Path) -> Source:
    """The source of the kernel that does the plan's part of the backward `problem`.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    view, kernel = view_of(problem, plan, features, root)
    return Source(fill_view(template_of(plan), view, root), kernel)


def view_of(
    problem: Problem, plan: AnyPlan, features: Features, root: Path
) -> tuple[DataclassInstance, KernelEntry]:
    """The values of the template of the plan's kernel, and how the kernel is launched."""
    uses = {role: use for role, use in uses_of(problem, features).items() if role in ROLES}
    if problem.eight_bit:
        return fp8_view_of(problem, plan, uses, root)
    operands = operands_of(uses)
    if isinstance(plan, LearnedPlan):
        kernel = _learned(problem, plan, operands)
        return learned_view(problem, plan, kernel, uses, root), kernel
    if isinstance(plan, BiasGradientPlan):
        kernel = _bias(problem, plan, operands)
        return bias_gradient_view(problem, plan, kernel, uses, root), kernel
    main = cast(BackwardPlan, plan)
    if main.family == OF_KEPT:  # which reads what scores have become
        uses, operands = {**uses, "score": []}, operands_of({**uses, "score": []})
    kernel = _main(problem, main, operands)
    return MAIN_VIEWS[plan.family](problem, main, kernel, uses, root), kernel


def _main(problem: Problem, plan: BackwardPlan, operands: Names) -> KernelEntry:
    of_queries = plan.tile_axis == "q"
    mask: tuple[Workspace, ...] = ()
    if problem.attn_mask and plan.family != OF_KEPT:
        mask = ("mask_rows",) if of_queries else ("mask_columns",)
    workspace = _main_workspace(problem, plan)
    return describe(
        problem,
        plan,
        [*_main_names(problem, plan, workspace, (*mask, *block_maps(problem, plan))), *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m if of_queries else plan.tile.n,
        tensor_maps=_main_maps(problem, plan),
        grid="persistent_pairs" if plan.pairs else "persistent_tiles",
        workspace=(*workspace, *(() if problem.made else mask)),
        kv_group_bytes=plan.schedule.kv_group_bytes,
        group_heads=plan.schedule.group_heads,
        tail_share=plan.schedule.tail_share,
        tile_axis="q" if of_queries else "kv",
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        dq_floats=plan.dq_floats,
        dkv_floats=plan.dkv_floats,
        dependent=plan.starts_early,
        orders_few=plan.orders_few,
        **({"block_ctas": dq_parts(problem)[0]} if plan.family == OF_KEPT else {}),
    )


def _main_workspace(problem: Problem, plan: BackwardPlan) -> tuple[Workspace, ...]:
    """Parts of the workspace of a main kernel but a mask's bits, in the order of parameters."""
    if plan.family == OF_KEPT:
        return ("d_s", "tile_counter")
    found: tuple[Workspace, ...] = ("lse_log2", "d")
    found += ("dq_acc",) if plan.dq_floats else ()
    found += ("tile_counter",)
    found += ("turns",) if plan.dq_floats else ()
    if problem.varlen:
        found += ("q_schedule",) if plan.family == OF_QUERIES else ("kv_schedule",)
    found += ("dbias_turns",) if plan.adds_bias else ()
    found += ("dkv_acc",) if plan.splits_heads else ()
    found += ("d_s",) if plan.kept_rows else ()
    found += ("row_sums",) if problem.bias else ()
    return found


def _main_maps(problem: Problem, plan: BackwardPlan) -> tuple[TensorMapRecipe, ...]:
    """Tensor maps of a main kernel: the bias comes, and its gradient leaves, in blocks' rows."""
    found = _tensor_maps(problem, plan)
    if problem.bias and plan.fused:
        found += tuple(replace(x, box_rows=plan.tile.m) for x in bias_maps(problem))
    if plan.adds_bias:
        found += (recipe("dbias", problem.dtype_q, plan.tile.m),)
    return found


def _main_names(
    problem: Problem,
    plan: BackwardPlan,
    workspace: tuple[Workspace, ...],
    mask: tuple[str, ...],
) -> Names:
    """The parameters of a main kernel but those that fragments read."""
    names = _tensor_names(problem, plan)
    if plan.family == OF_KEPT:
        return [*names, *_kept_names(problem, workspace)]
    names += typed("tensor_map", "map_bias") if problem.bias and plan.fused else []
    names += typed("tensor_map", "map_dbias") if plan.adds_bias else []
    names += typed("ptr", *workspace)
    names += typed("ptr", "dbias") if plan.sums_bias else []
    if plan.makes_d:
        names += typed("ptr", "lse", "dlse")
    elif problem.bias:
        names += typed("ptr", "lse")
    names += [("rng_state", "ptr")] if problem.dropout else []
    names += [("dlearned", "ptr")] if plan.fused and sums_keys(problem) else []
    for name in mask:
        names += mask_names(name, asked=problem.asks_mask)
    places, diagonal = diagonal_names(problem)[:-1], diagonal_names(problem)[-1:]
    names += places
    integers = [*INTEGERS, *(name for name, _ in diagonal)]
    # Neighbours are loaded together, so that their order shapes the code: that which was measured.
    place = 1 if plan.fused else len(integers)
    integers.insert(place, "q_tiles" if plan.tile_axis == "q" else "kv_blocks")
    names += typed("i32", *integers)
    names += typed("i32", "dbias_terms") if plan.adds_bias else []
    names += typed("i32", "dbias_columns") if plan.sums_bias else []
    names += typed("i32", "key_group") if plan.splits_heads else []
    names += typed("i32", "kept_rows", "heads_before") if plan.kept_rows else []
    names += typed("f32", "scale", "scale_log2")
    names += drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))
    return [*names, *(_filled(problem, plan, names) if problem.varlen else [])]


def _kept_names(problem: Problem, workspace: tuple[Workspace, ...]) -> Names:
    """The parameters, beside tensors, of the kernel that makes dQ of dS in memory."""
    integers = ("tiles", "heads_q", "total_heads", "heads_per_group", "tail_rows", "group_size")
    names = [*typed("ptr", *workspace), *typed("i32", *integers, "q_tiles")]
    names += [*diagonal_names(problem), *typed("i32", "kept_rows", "heads_before")]
    return [*names, *typed("f32", "scale", *(("keep_scale",) if problem.dropout else ()))]


def _filled(problem: Problem, plan: BackwardPlan, names: Names) -> Names:
    """Parameters, beside these, of gradients whose rows a main kernel fills that belong to no
    sequence: those that it makes, and dQ, which another one may convert."""
    sides = {"dq": problem.q_seq, "dk": problem.kv_seq, "dv": problem.kv_seq}
    made = {*(("dq",) if plan.fused else ()), *_gradients(plan)}
    tensors = [tensor for tensor in sides if tensor in made and sides[tensor] != "dense"]
    found = typed("i32", "sequences")
    for tensor in tensors:
        found += [*typed("ptr", tensor), *strides_of(tensor)]
    return [each for each in found if each not in names]


def _bias(problem: Problem, plan: BiasGradientPlan, operands: Names) -> KernelEntry:
    maps = (*_tensor_maps(problem, plan), *bias_maps(problem))
    workspace: tuple[Workspace, ...] = ("lse_log2", "d", "tile_counter", "row_sums")
    names = [*_tensor_names(problem, plan), *typed("ptr", "lse")]
    names += typed("tensor_map", "map_bias")
    names += typed("ptr", *workspace, "dbias", *(("rng_state",) if problem.dropout else ()))
    mask: tuple[Workspace, ...] = ("mask_rows",) if problem.attn_mask else ()
    for name in mask:
        names += mask_names(name, asked=problem.asks_mask)
    sizes = (f"dbias_{name}" for name in ("batches", "heads", "rows", "columns", "sums_rows"))
    places = ("sequences", "heads_q", "q_blocks", "group_size")
    names += [*typed("i32", *sizes, *places), *diagonal_names(problem)]
    names += typed("f32", "scale", "scale_log2")
    names += drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))
    return describe(
        problem,
        plan,
        [*names, *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        tensor_maps=maps,
        grid="multiprocessors",
        workspace=(*workspace, *(() if problem.made else mask)),
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )


def _learned(problem: Problem, plan: LearnedPlan, operands: Names) -> KernelEntry:
    workspace: tuple[Workspace, ...] = ("lse_log2", "d", "tile_counter")
    workspace += ("row_sums",) if problem.bias else ()
    mask: tuple[Workspace, ...] = ("mask_rows",) if problem.attn_mask else ()
    names = [*_tensor_names(problem, plan), *typed("ptr", "lse")]
    names += typed("tensor_map", "map_bias") if problem.bias else []
    names += typed("ptr", *workspace, "dlearned", *(("rng_state",) if problem.dropout else ()))
    for name in mask:
        names += mask_names(name, asked=problem.asks_mask)
    names += [*typed("i32", "sequences", "heads_q", "q_blocks", "group_size")]
    names += diagonal_names(problem)
    names += typed("f32", "scale", "scale_log2")
    names += drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))
    return describe(
        problem,
        plan,
        [*names, *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        tensor_maps=(*_tensor_maps(problem, plan), *bias_maps(problem)),
        grid="multiprocessors",
        workspace=(*workspace, *(() if problem.made else mask)),
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )


GRADIENTS = {
    **dict.fromkeys((OF_QUERIES, OF_KEPT), ("dq",)),
    **dict.fromkeys((*FUSED, OF_KEYS), ("dk", "dv")),
}


def _gradients(plan: BackwardPlan | BiasGradientPlan) -> tuple[str, ...]:
    """The gradients that the kernel makes, whole."""
    made = GRADIENTS.get(plan.family, ())
    return ("dq", *made) if isinstance(plan, BackwardPlan) and plan.completes else made


def _outputs(plan: BackwardPlan | BiasGradientPlan) -> tuple[str, ...]:
    """Outputs of the forward that the kernel reads."""
    return ("o",) if isinstance(plan, BackwardPlan) and plan.makes_d else ()


def _tensor_names(problem: Problem, plan: BackwardPlan | BiasGradientPlan) -> Names:
    """The parameters by which a kernel finds its operands and gradients."""
    gradients = _gradients(plan)
    if plan.family == OF_KEPT:
        return [*operand_names(problem, "k"), *typed("ptr", "dq"), *strides_of("dq")]
    if not (problem.gather or problem.wide_gradients):
        return operand_names(problem, "q", "k", "v", "d_o", *_outputs(plan), *gradients)
    names = [*operand_names(problem, "q", "k", "v", "d_o"), *typed("ptr", *gradients)]
    for tensor in gradients:
        names += strides_of(tensor)
    return [*names, *(typed("i32", "dim_qk", "dim_v") if problem.gather else ())]


def _tensor_maps(
    problem: Problem, plan: BackwardPlan | BiasGradientPlan
) -> tuple[TensorMapRecipe, ...]:
    """Operands in whole tiles and blocks, gradients in a warpgroup's rows."""
    if problem.gather:
        return ()
    if plan.family == OF_KEPT:
        return (recipe("k", problem.dtype_q, plan.tile.n),)
    rows = {"q": plan.tile.m, "k": plan.tile.n, "v": plan.tile.n, "d_o": plan.tile.m}
    rows |= dict.fromkeys(_outputs(plan), plan.tile.m)
    rows |= dict.fromkeys(() if problem.wide_gradients else _gradients(plan), STORE_ROWS)
    return tuple(recipe(tensor, problem.dtype_q, n) for tensor, n in rows.items())
