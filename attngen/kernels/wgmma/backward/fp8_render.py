"""Render, 8-bit backward: each of its kernels' launches, and the values of its template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ....runtime.program import KernelEntry, TensorMapRecipe, Workspace
from ....spec.problem import Problem
from ...params import (
    DROP_THRESHOLD,
    Names,
    bias_maps,
    describe,
    mask_names,
    operand_names,
    operands_of,
    recipe,
    strides_of,
    typed,
)
from ...support.around import ConvertPlan
from ...support.view_parts import Uses
from .fp8_choices import column_parts, image_bytes, key_image_bytes, leaves_rows
from .fp8_view import fp8_convert_view, fp8_view, turning_view
from .plan import BackwardPlan, BiasGradientPlan, TurningPlan
from .view_bias_gradient import bias_gradient_view

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EightBitPlan = TurningPlan | BackwardPlan | ConvertPlan | BiasGradientPlan
STORE_ROWS = 64  # gradients leave in boxes of one warpgroup's rows
INTEGERS = (
    *("tiles", "kv_blocks", "q_blocks", "heads_q", "heads_kv", "total_heads", "heads_per_group"),
    *("tail_rows", "group_size", "bottom_right"),
)
ROWS: tuple[Workspace, ...] = ("lse_log2", "d", "turns", "queries_turned", "keys_turned")
OPERANDS, GRADIENTS = ("q", "k", "v", "d_o"), ("dk", "dv")
SCALES = ("descale_q", "descale_k", "descale_v", "descale_do", "scale_s", "descale_s")


def view_of(
    problem: Problem, plan: EightBitPlan, uses: Uses, root: Path
) -> tuple[DataclassInstance, KernelEntry]:
    """The values of the template of the plan's kernel, and how the kernel is launched. uses: of the
    backward's fragments, by role."""
    if isinstance(plan, TurningPlan):
        read = {role: uses[role] for role in ("q_seq", "kv_seq")}
        kernel = _prepare(problem, plan, operands_of(read))
        return turning_view(problem, plan, kernel, read, root), kernel
    if isinstance(plan, ConvertPlan):
        read = {"q_seq": uses["q_seq"]}
        kernel = _convert(problem, plan, operands_of(read))
        return fp8_convert_view(problem, plan, kernel, read, root), kernel
    if isinstance(plan, BiasGradientPlan):
        kernel = _bias(problem, plan, operands_of(uses))
        return bias_gradient_view(problem, plan, kernel, uses, root), kernel
    kernel = _main(problem, plan, operands_of(uses))
    return fp8_view(problem, plan, kernel, uses, root), kernel


def _prepare(problem: Problem, plan: TurningPlan, operands: Names) -> KernelEntry:
    scales = ["descale_do", "scale_s"]
    scales += ["descale_o"] if problem.dtype_of("o") in ("e4m3", "e5m2") else []
    names = typed("ptr", "q", "k", "o", "d_o", "lse", "dlse", *ROWS, *scales)
    for tensor in ("q", "k", "o", "d_o"):
        names += strides_of(tensor)
    names += operands if problem.varlen else typed("i32", "q_len", "kv_len")
    names += typed("i32", "sequences") if problem.varlen else []
    names += typed("i32", "tiles", "kv_blocks", "heads_q", "heads_kv", "q_blocks")
    names += typed("f32", "keep_scale", "keep_share") if problem.dropout else []
    return describe(
        problem,
        plan,
        names,
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.n,
        tile_axis="kv",
        grid="row_blocks",
        folds=True,
        workspace=ROWS,
        row_block=plan.tile.m,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        turned_bytes=column_parts(problem) * image_bytes(problem),
        turned_key_bytes=key_image_bytes(problem, plan.key_columns),
    )


def _convert(problem: Problem, plan: ConvertPlan, operands: Names) -> KernelEntry:
    scales = ["descale_dp", "descale_k"]
    scales += ["scale_dq"] if problem.dtype_of("dq") in ("e4m3", "e5m2") else []
    names = [*typed("ptr", "dq_acc", "turns", "dq", "amax_dq", *scales), *strides_of("dq")]
    names += operands if problem.varlen else typed("i32", "q_len")
    names += typed("i32", "sequences") if problem.varlen else []
    names += typed("i32", "heads_q", "q_blocks")
    return describe(
        problem,
        plan,
        names,
        tile_rows=plan.row_block,
        grid="row_blocks",
        folds=True,
        workspace=("dq_acc", "turns"),
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        block_ctas=plan.parts,
        dq_floats=plan.parts * 64 * plan.dq_columns,
    )


def _main(problem: Problem, plan: BackwardPlan, operands: Names) -> KernelEntry:
    workspace: tuple[Workspace, ...] = ("lse_log2", "d", "dq_acc", "tile_counter", "turns")
    workspace += ("queries_turned", "keys_turned")
    workspace += ("kv_schedule",) if problem.varlen else ()
    mask: tuple[Workspace, ...] = ("mask_columns",) if problem.attn_mask else ()
    eight_bit = problem.dtype_of("dk") in ("e4m3", "e5m2")
    parts = column_parts(problem)
    mapped = () if leaves_rows(problem) else GRADIENTS
    names = operand_names(problem, *OPERANDS, *mapped)
    names += typed("tensor_map", "map_bias") if problem.bias else []
    names += typed("ptr", *workspace, *SCALES, "scale_dp", "descale_dp")
    names += typed("ptr", "scale_dk", "scale_dv") if eight_bit else []
    names += typed("ptr", "amax_dp", "amax_dk", "amax_dv")
    names += typed("ptr", "rng_state") if problem.dropout else []
    for name in mask:
        names += mask_names(name)
    names += [*typed("i32", *INTEGERS), *typed("f32", "scale", "scale_log2")]
    names += [*DROP_THRESHOLD, ("keep_share", "f32")] if problem.dropout else []
    stored = () if mapped else GRADIENTS
    names += _addressed(problem, stored) if problem.varlen or stored else []
    return describe(
        problem,
        plan,
        [*names, *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.n,
        tensor_maps=_maps(problem, plan, mapped),
        grid="persistent_tiles",
        workspace=(*workspace, *(() if problem.made else mask)),
        kv_group_bytes=plan.schedule.kv_group_bytes,
        group_heads=plan.schedule.group_heads,
        tail_share=plan.schedule.tail_share,
        tile_axis="kv",
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
        block_ctas=parts,
        dq_floats=parts * plan.dq_floats,
        turned_bytes=parts * image_bytes(problem),
        turned_key_bytes=key_image_bytes(problem, plan.dq_columns * plan.consumers * parts),
        dependent=plan.starts_early,
        orders_few=plan.orders_few,
    )


def _bias(problem: Problem, plan: BiasGradientPlan, operands: Names) -> KernelEntry:
    workspace: tuple[Workspace, ...] = ("lse_log2", "d", "tile_counter")
    scales = ("descale_q", "descale_k", "descale_v", "descale_do", "scale_s")
    names = [*operand_names(problem, *OPERANDS), ("map_bias", "tensor_map")]
    names += typed("ptr", *workspace, "dbias", *scales)
    names += typed("ptr", "rng_state") if problem.dropout else []
    mask: tuple[Workspace, ...] = ("mask_rows",) if problem.attn_mask else ()
    for name in mask:
        names += mask_names(name)
    sizes = (f"dbias_{name}" for name in ("batches", "heads", "rows", "columns", "sums_rows"))
    places = ("sequences", "heads_q", "q_blocks", "group_size", "bottom_right")
    names += [*typed("i32", *sizes, *places), *typed("f32", "scale", "scale_log2")]
    names += [*DROP_THRESHOLD, ("keep_share", "f32")] if problem.dropout else []
    return describe(
        problem,
        plan,
        [*names, *operands],
        smem_bytes=plan.smem_bytes,
        tile_rows=plan.tile.m,
        tensor_maps=(*_operand_maps(problem, plan), *bias_maps(problem)),
        grid="multiprocessors",
        workspace=(*workspace, *(() if problem.made else mask)),
        row_block=plan.row_block,
        q_seq=problem.q_seq,
        kv_seq=problem.kv_seq,
    )


def _maps(
    problem: Problem, plan: BackwardPlan, gradients: tuple[str, ...]
) -> tuple[TensorMapRecipe, ...]:
    """Operands in whole tiles and blocks, gradients in a warpgroup's rows."""
    stored = (recipe(tensor, problem.dtype_of(tensor), STORE_ROWS) for tensor in gradients)
    of_bias = (replace(x, box_rows=plan.tile.m) for x in bias_maps(problem))
    return (*_operand_maps(problem, plan), *stored, *of_bias)


def _operand_maps(
    problem: Problem, plan: BackwardPlan | BiasGradientPlan
) -> tuple[TensorMapRecipe, ...]:
    """Operands in whole tiles and blocks."""
    rows = {"q": plan.tile.m, "k": plan.tile.n, "v": plan.tile.n, "d_o": plan.tile.m}
    return tuple(recipe(tensor, problem.dtype_of(tensor), n) for tensor, n in rows.items())


def _addressed(problem: Problem, stored: tuple[str, ...]) -> Names:
    """Parameters of gradients whose rows the main kernel finds itself: that it stores from
    registers, or fills where they belong to no sequence."""
    sides = {"dq": problem.q_seq, "dk": problem.kv_seq, "dv": problem.kv_seq}
    found = typed("i32", "sequences") if problem.varlen else []
    for tensor, sequence in sides.items():
        if sequence != "dense" or tensor in stored:
            found += [*typed("ptr", tensor), *strides_of(tensor)]
    return found
