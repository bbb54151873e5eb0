"""Choices of a backward: which kernels make the gradients, and the preferred plan of each."""

from __future__ import annotations

from collections.abc import Iterator

from ....spec.attention_spec import MAX_TRAINED_HEAD_DIM
from ....spec.problem import Problem
from ....targets.target import Target
from ...base import KernelPlan, Tile
from ...support.around import (
    CONVERT,
    CONVERT_THREADS,
    PREPARE,
    PREPARE_THREADS,
    ConvertPlan,
    PreparePlan,
    RowSumsPlan,
    row_sums_plan,
)
from ..shared import BARRIER_BYTES, boxes_of
from . import fp8_choices
from .bias_gradient import bias_plans, learned_plans, sums_queries
from .feasible import (
    JOB_BYTES,
    SMALL_BYTES,
    Draft,
    feasible_dkv,
    feasible_dq,
    finish,
    make_fused,
)
from .kept import KEPT_ROWS, MOST_STAGES, dq_parts
from .plan import OF_KEPT, ROWS_PER_CONSUMER, WITH_BIAS, WITH_SUMS, BackwardPlan
from .registers import fuses

MADE_BLOCKS = 8  # a CTA, where it has hardly anything to do with most


def plans(problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
    """The preferred plan of each kernel, in the order of launch; none where nothing fits."""
    if problem.eight_bit:
        return fp8_choices.plans(problem, target)
    if problem.dtype_q not in ("fp16", "bf16") or problem.dtype_o != problem.dtype_q:
        return ()
    if max(problem.head_dim_qk, problem.head_dim_v) > MAX_TRAINED_HEAD_DIM:
        return ()
    if fuses(problem):
        fused = make_fused(problem, target)
        converts = () if fused.completes else (_convert(problem, fused),)
        return (
            _prepare(fused),
            *_row_sums(problem, fused.row_block, target),
            fused,
            *_adding(problem, target),
            *converts,
            *bias_plans(problem, fused.row_block, target),
            *learned_plans(problem, fused.row_block, target),
        )
    dkv = next(feasible_dkv(problem, target), None)
    dq = dkv and next(feasible_dq(problem, dkv.row_block, target), None)
    if not (dkv and dq):
        return ()
    rows = dkv.row_block
    sums, biases = _row_sums(problem, rows, target), bias_plans(problem, rows, target)
    learned = learned_plans(problem, rows, target)
    kept = (_of_kept(problem, rows, target),) if dkv.kept_rows else ()
    return (_prepare(dkv), *sums, dkv, dq, *kept, *biases, *learned)


def _of_kept(problem: Problem, row_block: int, target: Target) -> BackwardPlan:
    """The plan of the kernel that makes dQ of dS in memory, a product of 64 keys a block."""
    tile = Tile(KEPT_ROWS, ROWS_PER_CONSUMER)
    columns = dq_parts(problem)[1]
    keys, d_s = tile.n * 128 * boxes_of(columns), tile.m * 128
    stages = min(MOST_STAGES, (target.cta_smem_bytes - SMALL_BYTES) // (keys + d_s))
    sizes = {"K": stages * keys, "Ds": stages * d_s}
    small = {"Barriers": (2 + 2 * stages) * BARRIER_BYTES}
    consumers = KEPT_ROWS // ROWS_PER_CONSUMER
    draft = Draft(
        *(OF_KEPT, tile, sizes, small, stages, stages, row_block),
        job_bytes=JOB_BYTES + 4,  # and which part of the columns
        consumers=consumers,
        kept_rows=KEPT_ROWS,
    )
    return finish(problem, draft, target)


def _prepare(main: BackwardPlan) -> PreparePlan:
    turns, zeros = main.dq_floats > 0, main.completes
    made, blocks = (main.tile.n, MADE_BLOCKS) if main.makes_d else (0, 1)
    threads = PREPARE_THREADS
    return PreparePlan(main.arch, PREPARE, main.row_block, turns, zeros, made, blocks, threads)


def _row_sums(problem: Problem, row_block: int, target: Target) -> Iterator[RowSumsPlan]:
    """The plan of the kernel for rows of large scores, which a bias may have."""
    if problem.bias:
        yield row_sums_plan(target.name, row_block)


def _convert(problem: Problem, main: BackwardPlan) -> ConvertPlan:
    split, columns = main.dq_split, main.dq_columns
    rows, parts = main.row_block, main.consumers
    dk, dv = (main.dk_columns, main.dv_columns) if main.splits_heads else (0, 0)
    keys = main.tile.n if main.splits_heads else 0
    learns, threads = sums_queries(problem), CONVERT_THREADS
    return ConvertPlan(
        main.arch, CONVERT, rows, parts, split, columns, dk, dv, keys, threads, learns
    )


def _adding(problem: Problem, target: Target) -> Iterator[BackwardPlan]:
    """The plans of the fused kernel for calls whose bias's gradient it can make, too: of one with a
    row for each query, in calls that ask for no order, where there is room, as dS lies in shared
    memory as the copy engine adds it; of one with a row for all queries, by sums in registers."""
    others = problem.dropout or problem.attn_mask or problem.gather or problem.wide_gradients
    if not problem.bias or others:
        return
    if not problem.deterministic:
        made = make_fused(problem, target, WITH_BIAS)
        if made.smem_bytes <= target.cta_smem_bytes:
            yield made
    yield make_fused(problem, target, WITH_SUMS)
