"""Render, around a backward: the kernels before and after those that make its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...fragments.features import Features
from ...runtime.program import KernelEntry, Workspace
from ...spec.problem import Problem
from ..fill import Source, fill_view
from ..params import Names, describe, diagonal_names, mask_names, operands_of, strides_of, typed
from ..plan import template_of
from ..uses import FragmentUse, uses_of
from .around import CLEARED, AroundPlan, ClearPlan, ConvertPlan, PreparePlan, RowSumsPlan
from .view_around import convert_view, prepare_view, row_sums_view
from .view_parts import Uses, sequence_view

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROW_SUMS_ROLES = ("mask", "score", "q_seq", "kv_seq", "kv_iter")


def render(problem: Problem, plan: AroundPlan, features: Features, root: Path) -> Source:
    """The source of the kernel that does the plan's part around the backward `problem`.

    root: the templates' directory. Raises: jinja2.UndefinedError on a template's mistake.
    """
    view, kernel = view_of(problem, plan, features, root)
    return Source(fill_view(template_of(plan), view, root), kernel)


def view_of(
    problem: Problem, plan: AroundPlan, features: Features, root: Path
) -> tuple[DataclassInstance, KernelEntry]:
    """The values of the template of the plan's kernel, and how the kernel is launched."""
    known = uses_of(problem, features)
    uses = _used(problem, plan, known)
    operands = operands_of(uses)
    if isinstance(plan, PreparePlan):
        kernel = _prepare(problem, plan, operands)
        return prepare_view(problem, plan, kernel, uses, root), kernel
    if isinstance(plan, ConvertPlan):
        learned = [use for use in known["score"] if use.fragment.learned and plan.learns]
        kernel = _convert(problem, plan, operands, learned)
        keys = sequence_view(known["kv_seq"][0])
        return convert_view(problem, plan, kernel, uses, keys, learned, root), kernel
    kernel = _row_sums(problem, plan, operands)
    return row_sums_view(problem, plan, kernel, uses, root), kernel


def _used(problem: Problem, plan: AroundPlan, known: Uses) -> Uses:
    """The fragments of which the kernel makes use, of all that the problem has."""
    if isinstance(plan, RowSumsPlan):
        return {role: use for role, use in known.items() if role in ROW_SUMS_ROLES}
    masked = isinstance(plan, PreparePlan) and plan.zeros
    of_keys = isinstance(plan, ConvertPlan) and plan.dk_columns > 0 and problem.varlen
    read = ("mask",) * masked + ("q_seq",) + ("kv_seq",) * (masked or of_keys)
    return {role: known[role] for role in read}


def _prepare(problem: Problem, plan: PreparePlan, operands: Names) -> KernelEntry:
    workspace: tuple[Workspace, ...] = ("lse_log2", "d")
    workspace += ("turns",) if plan.turns else ()
    workspace += ("dq_acc",) if isinstance(plan, ClearPlan) else ()
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
        dq_floats=plan.dq_floats if isinstance(plan, ClearPlan) else 0,
    )


def _convert(
    problem: Problem, plan: ConvertPlan, operands: Names, learned: Sequence[FragmentUse]
) -> KernelEntry:
    counts = plan.dq_split not in CLEARED
    workspace: tuple[Workspace, ...] = ("dq_acc", "turns" if counts else "dq_added")
    names = [*typed("ptr", "dq_acc", *(("turns",) * counts), "dq"), *strides_of("dq")]
    names += [*_lengths(problem, operands), ("scale", "f32")]
    names += [("keep_scale", "f32")] if problem.dropout else []
    names += typed("i32", "dim_qk") if problem.gather else []
    if learned:
        names += [*typed("ptr", "q", "dlearned"), *strides_of("q")]
        names += operands_of({"score": [*learned]})
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
        workspace=("row_sums", *(("mask_rows",) if problem.packs_mask else ())),
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
