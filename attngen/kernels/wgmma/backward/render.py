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
from .fp8_render import view_of as fp8_view_of
from .plan import (
    FUSED,
    OF_KEYS,
    OF_QUERIES,
    AnyPlan,
    BackwardPlan,
    BiasGradientPlan,
    ConvertPlan,
    LearnedPlan,
    PreparePlan,
    RowSumsPlan,
)
from .view import dkv_view, dq_view
from .view_around import convert_view, prepare_view, row_sums_view
from .view_bias_gradient import bias_gradient_view
from .view_fused import fused_view
from .view_learned import learned_view
from .view_parts import Uses, sequence_view

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .fp8_render import EightBitPlan

STORE_ROWS = 64  # gradients leave in boxes of one warpgroup's rows
# Those of a forward that its backward shares.
ROLES = ("mask", "score", "q_seq", "kv_seq", "kv_fetch")
ROW_SUMS_ROLES = ("mask", "score", "q_seq", "kv_seq", "kv_iter")
MAIN_VIEWS: dict[str, Callable[..., DataclassInstance]] = {
    **dict.fromkeys(FUSED, fused_view),
    OF_KEYS: dkv_view,
    OF_QUERIES: dq_view,
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
    roles = ROW_SUMS_ROLES if isinstance(plan, RowSumsPlan) else ROLES
    uses = {role: use for role, use in uses_of(problem, features).items() if role in roles}
    view: DataclassInstance
    if problem.eight_bit:
        return fp8_view_of(problem, cast("EightBitPlan", plan), uses, root)
    keys = sequence_view(uses["kv_seq"][0])
    if isinstance(plan, PreparePlan | ConvertPlan):
        uses = _used_around(problem, plan, uses)
    operands = operands_of(uses)
    if isinstance(plan, PreparePlan):
        kernel = _prepare(problem, plan, operands)
        view = prepare_view(problem, plan, kernel, uses, root)
    elif isinstance(plan, ConvertPlan):
        kernel = _convert(problem, plan, operands)
        view = convert_view(problem, plan, kernel, uses, keys, root)
    elif isinstance(plan, RowSumsPlan):
        kernel = _row_sums(problem, plan, operands)
        view = row_sums_view(problem, plan, kernel, uses, root)
    elif isinstance(plan, LearnedPlan):
        kernel = _learned(problem, plan, operands)
        view = learned_view(problem, plan, kernel, uses, root)
    elif isinstance(plan, BiasGradientPlan):
        kernel = _bias(problem, plan, operands)
        view = bias_gradient_view(problem, plan, kernel, uses, root)
    else:
        kernel = _main(problem, cast(BackwardPlan, plan), operands)
        view = MAIN_VIEWS[plan.family](problem, plan, kernel, uses, root)
    return view, kernel


def _used_around(problem: Problem, plan: PreparePlan | ConvertPlan, uses: Uses) -> Uses:
    """The fragments of which a kernel around the main ones makes use."""
    masked = isinstance(plan, PreparePlan) and plan.zeros
    of_keys = isinstance(plan, ConvertPlan) and plan.dk_columns > 0 and problem.varlen
    read = ("mask",) * masked + ("q_seq",) + ("kv_seq",) * (masked or of_keys)
    return {role: uses[role] for role in read}


def _prepare(problem: Problem, plan: PreparePlan, operands: Names) -> KernelEntry:
    workspace: tuple[Workspace, ...] = ("lse_log2", "d")
    workspace += ("turns",) if plan.turns else ()
    names = typed("ptr", "o", "d_o", "lse", "dlse", *workspace)
    names += [*strides_of("o"), *strides_of("d_o"), *_lengths(problem, operands, plan.zeros)]
    if plan.zeros:
        names += [*typed("ptr", "dq"), *strides_of("dq"), *diagonal_names(problem)]
    names += typed("i32", "group_size", "main_follows") if plan.made_tile else []
    if problem.gather:
        names += typed("i64", "o_stride_column", "d_o_stride_column") + typed("i32", "dim_v")
    names += [("keep_share", "f32")] if problem.dropout else []
    return describe(
        problem,
        plan,
        names,
        tile_rows=plan.row_block,
        grid="row_blocks",
        folds=True,
        workspace=workspace,
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        cta_blocks=plan.cta_blocks,
    )


def _convert(problem: Problem, plan: ConvertPlan, operands: Names) -> KernelEntry:
    names = [*typed("ptr", "dq_acc", "turns", "dq"), *strides_of("dq")]
    names += [*_lengths(problem, operands), ("scale", "f32")]
    names += [("keep_scale", "f32")] if problem.dropout else []
    names += typed("i32", "dim_qk") if problem.gather else []
    workspace: tuple[Workspace, ...] = ("dq_acc", "turns")
    if plan.dk_columns:
        workspace += ("dkv_acc",)
        names += [*typed("ptr", "dkv_acc", "dk", "dv"), *strides_of("dk"), *strides_of("dv")]
        names += typed("i32", "key_parts", "heads_kv")
        names += [] if problem.varlen else typed("i32", "kv_len")
    return describe(
        problem,
        plan,
        names,
        tile_rows=plan.row_block,
        grid="row_blocks",
        folds=True,
        workspace=workspace,
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        block_ctas=plan.parts,
        dq_floats=plan.parts * 64 * plan.dq_columns,
    )


def _row_sums(problem: Problem, plan: RowSumsPlan, operands: Names) -> KernelEntry:
    names = typed("ptr", "q", "k", "lse", "row_sums")
    names += [*strides_of("q"), *strides_of("k")]
    if problem.gather:
        names += typed("i64", "q_stride_column", "k_stride_column") + typed("i32", "dim_qk")
    names += mask_names("mask_rows") if problem.attn_mask else []
    names += typed("i32", "heads_q", "group_size", "q_blocks") + diagonal_names(problem)
    names += typed("i32", "sequences") if problem.varlen else []
    return describe(
        problem,
        plan,
        [*names, ("scale", "f32"), *operands],
        tile_rows=plan.row_block,
        grid="row_blocks",
        folds=True,
        workspace=("row_sums", *(("mask_rows",) if problem.attn_mask else ())),
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )


def _lengths(problem: Problem, operands: Names, masked: bool = False) -> Names:
    """Parameters by which kernels around the main ones know sequences, those of keys if `masked`,
    and the grid of blocks."""
    known = operands if problem.varlen or masked else typed("i32", "q_len")
    known = [*known, *typed("i32", "sequences")] if problem.varlen else known
    return [*known, *typed("i32", "heads_q", "q_blocks")]


def _main(problem: Problem, plan: BackwardPlan, operands: Names) -> KernelEntry:
    of_queries = plan.family == OF_QUERIES
    mask: tuple[Workspace, ...] = ()
    if problem.attn_mask:
        mask = ("mask_rows",) if of_queries else ("mask_columns",)
    workspace = _main_workspace(problem, plan)
    return describe(
        problem,
        plan,
        [*_main_names(problem, plan, workspace, mask), *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m if of_queries else plan.tile.n,
        tensor_maps=_main_maps(problem, plan),
        grid="persistent_tiles",
        workspace=(*workspace, *mask),
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
    )


def _main_workspace(problem: Problem, plan: BackwardPlan) -> tuple[Workspace, ...]:
    """Parts of the workspace of a main kernel but a mask's bits, in the order of parameters."""
    found: tuple[Workspace, ...] = ("lse_log2", "d")
    found += ("dq_acc",) if plan.dq_floats else ()
    found += ("tile_counter",)
    found += ("turns",) if plan.dq_floats else ()
    if problem.varlen:
        found += ("q_schedule",) if plan.family == OF_QUERIES else ("kv_schedule",)
    found += ("dbias_turns",) if plan.adds_bias else ()
    found += ("dkv_acc",) if plan.splits_heads else ()
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
    mask: tuple[Workspace, ...],
) -> Names:
    """The parameters of a main kernel but those that fragments read."""
    names = _tensor_names(problem, plan)
    names += typed("tensor_map", "map_bias") if problem.bias and plan.fused else []
    names += typed("tensor_map", "map_dbias") if plan.adds_bias else []
    names += typed("ptr", *workspace)
    if plan.makes_d:
        names += typed("ptr", "lse", "dlse")
    elif problem.bias:
        names += typed("ptr", "lse")
    names += [("rng_state", "ptr")] if problem.dropout else []
    for name in mask:
        names += mask_names(name)
    integers = [*INTEGERS, *(name for name, _ in diagonal_names(problem))]
    # Neighbours are loaded together, so that their order shapes the code: that which was measured.
    place = 1 if plan.fused else len(integers)
    integers.insert(place, "q_tiles" if plan.family == OF_QUERIES else "kv_blocks")
    names += typed("i32", *integers)
    names += typed("i32", "dbias_terms") if plan.adds_bias else []
    names += typed("i32", "key_group") if plan.splits_heads else []
    names += typed("f32", "scale", "scale_log2")
    names += drop_names(problem, *DROP_THRESHOLD, ("keep_scale", "f32"))
    return [*names, *(_filled(problem, plan, names) if problem.varlen else [])]


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
        names += mask_names(name)
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
        workspace=(*workspace, *mask),
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
        names += mask_names(name)
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
        workspace=(*workspace, *mask),
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )


GRADIENTS = {OF_QUERIES: ("dq",), **dict.fromkeys((*FUSED, OF_KEYS), ("dk", "dv"))}


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
    rows = {"q": plan.tile.m, "k": plan.tile.n, "v": plan.tile.n, "d_o": plan.tile.m}
    rows |= dict.fromkeys(_outputs(plan), plan.tile.m)
    rows |= dict.fromkeys(() if problem.wide_gradients else _gradients(plan), STORE_ROWS)
    return tuple(recipe(tensor, problem.dtype_q, n) for tensor, n in rows.items())
