"""Plans of the kernels that make the gradient of a bias, and of what a score learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....fragments.program import learns
from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import Tile, lay_out, score_tile_bytes
from ..shared import BARRIER_BYTES, boxes_of
from .feasible import CONSUMERS
from .plan import OF_BIAS, OF_LEARNED, ROWS_PER_CONSUMER, BiasGradientPlan, LearnedPlan
from .registers import BIAS_LENGTH_REGISTERS, REGISTERS
from .wide import is_wide

TERM_BYTES, PROGRESS_BYTES = 24, 8  # structs of the kernel of a bias's gradient
LEARNED_KEYS = 64  # a tile: threads have its products as well as its weights and their gradients


def bias_plans(problem: Problem, row_block: int, target: Target) -> Iterator[BiasGradientPlan]:
    """The plan of the kernel of the bias's gradient, where there is a bias: the largest tile of 128
    rows, of wide heads of 64, that fits, then as many buffers as do."""
    if not problem.bias:
        return
    # Random words, a mask's bits and further scores take the room of some keys.
    crowded = problem.dropout or problem.attn_mask or len(problem.scores) > 1
    # So does the loader where lengths vary, or that copies rows itself.
    most = ((128, 112), (96, 80))[bool(crowded)][problem.varlen or problem.gather]
    sizes = [n for n in (128, 112, 96, 80, 64, 32) if n == most or n < most and n % 32 == 0]
    choices = [(n, stages) for n in sizes for stages in (4, 3, 2)]
    made = (_make_plan(problem, row_block, target, *choice) for choice in choices)
    fields = next(filter(None, made))
    yield BiasGradientPlan(family=OF_BIAS, **fields)


def learned_plans(problem: Problem, row_block: int, target: Target) -> Iterator[LearnedPlan]:
    """The plan of the kernel of the gradients of what a score learns, where it does."""
    if not learns(problem.scores):
        return
    choices = [(n, stages) for n in (LEARNED_KEYS, 32) for stages in (4, 3, 2)]
    made = (_make_plan(problem, row_block, target, *choice) for choice in choices)
    fields = next(filter(None, made))
    yield LearnedPlan(family=OF_LEARNED, **fields)


def _make_plan(
    problem: Problem, row_block: int, target: Target, n: int, stages: int
) -> dict[str, Any] | None:
    """The plan, but for its kernel, of `n` keys a tile in so many stages; None where it does not
    fit."""
    consumers = 1 if is_wide(problem) else CONSUMERS  # two stages of 128 rows have no room
    tile = Tile(ROWS_PER_CONSUMER * consumers, n)
    element_bytes = DTYPE_BYTES[problem.dtype_q]
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    boxes = boxes_of(largest, element_bytes)
    sizes = {
        "Stages": stages * (tile.m + n) * 128 * boxes,
        "Bias": 4 * consumers * score_tile_bytes(16, n) * problem.bias,
    }
    barriers = 2 * stages + 4 * consumers + 4  # of a warp's part of the bias, of what is drawn
    small = {"Barriers": barriers * BARRIER_BYTES, "Terms": stages * TERM_BYTES + PROGRESS_BYTES}
    regions = lay_out(sizes, small)
    smem_bytes = regions[-1].offset + regions[-1].bytes
    if smem_bytes > target.cta_smem_bytes:
        return None
    loads_more = problem.varlen or problem.gather or boxes > 3
    producer, consumer = BIAS_LENGTH_REGISTERS if loads_more else REGISTERS[OF_BIAS]
    return {
        "arch": target.name,
        "tile": tile,
        "consumers": consumers,
        "stages": stages,
        "producer_registers": producer,
        "consumer_registers": consumer,
        "row_block": row_block,
        "smem": regions,
        "smem_bytes": smem_bytes,
        "threads": 128 * (consumers + 1),
    }
