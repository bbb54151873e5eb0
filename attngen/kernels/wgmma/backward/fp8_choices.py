"""Choices of an 8-bit backward: its kernels, tiles, stages and shared memory.

As in 16 bits one kernel makes dQ, dK and dV of head dims up to 128, but its operands take half the
room: consumers have some of a tile's keys in registers, and beside each block of queries and output
gradients there is one of both transposed, which a kernel before lays down. A kernel that transposed
them itself would read and write another 32 KB of shared memory a block, which its products keep
busy: 232 KB a block of 64 queries at head dim 128, for 1,280 cycles of products.
"""

from __future__ import annotations

from dataclasses import replace

from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import Tile
from ..shared import BARRIER_BYTES
from .feasible import CONSUMERS, Draft, finish
from .plan import (
    CONVERT_8,
    MAIN_8,
    PREPARE_8,
    ROWS_PER_CONSUMER,
    BackwardPlan,
    ConvertPlan,
    TurningPlan,
)

PREPARE_THREADS = 256
CONVERT_THREADS = 128  # those whose fragments a part of dQ's workspace is
# Registers a thread of the producer and of a consumer: a CTA starts with 504 for these roles
# together, no more of which may be handed over.
REGISTERS = (40, 232)
BARRIERS = 26
FACTOR_BYTES = 16
MOST_COLUMNS = 128  # of dK and dV of 64 keys, which a consumer has registers for
SMALL_COLUMNS = 64  # of Q, up to which V may have no more
STAGES = 2  # of all that blocks have
IMAGE_ROW_BYTES = 128
STEP = 32  # of a product's reduction, in 8-bit elements
HELD_STEPS = 2  # of a tile's keys in registers; three spill


def image_bytes(problem: Problem) -> int:
    """Bytes of a block's queries and output gradients, transposed: a row of 128 bytes a column,
    with the block's queries of both."""
    return max(problem.head_dim_qk, problem.head_dim_v) * IMAGE_ROW_BYTES


def key_image_bytes(key_columns: int) -> int:
    """Bytes of a tile's keys, transposed: a row a column."""
    return key_columns * IMAGE_ROW_BYTES


def plans(problem: Problem, target: Target) -> tuple[BackwardPlan | TurningPlan | ConvertPlan, ...]:
    """The plan of each kernel, in the order of launch; none where nothing fits."""
    d, largest = problem.head_dim_qk, max(problem.head_dim_qk, problem.head_dim_v)
    if largest > MOST_COLUMNS or d <= SMALL_COLUMNS < largest:
        return ()
    main = _main(problem, target)
    if main.smem_bytes > target.cta_smem_bytes:
        return ()
    return _prepare(problem, main), main, _convert(main)


def _main(problem: Problem, target: Target) -> BackwardPlan:
    """128 keys and 64 queries: beside 128, as in 16 bits up to head dim 64, consumers spill."""
    tile = Tile(ROWS_PER_CONSUMER, ROWS_PER_CONSUMER * CONSUMERS)
    d, d_v = problem.head_dim_qk, problem.head_dim_v
    dq_columns = -(-d // (16 * CONSUMERS)) * 16
    row_bytes = max(d, d_v) * DTYPE_BYTES[problem.dtype_of("dk")]
    block, keys, gradient = tile.m * 128, tile.n * 128, -(-row_bytes // 128) * tile.n * 128
    sizes = {
        **{"Q": STAGES * block, "Do": STAGES * block, "Turned": STAGES * image_bytes(problem)},
        **{"K": keys, "V": keys, "Kt": key_image_bytes(dq_columns * CONSUMERS)},
        "Ds": STAGES * block,
        "Dq": CONSUMERS * ROWS_PER_CONSUMER * dq_columns * 4,
        **{"Dv": gradient, "Dk": gradient},
    }
    rows = STAGES * tile.m * 4
    small = {"Factors": FACTOR_BYTES, "Lse": rows, "D": rows, "Barriers": BARRIERS * BARRIER_BYTES}
    draft = Draft(
        family=MAIN_8,
        tile=tile,
        sizes=sizes,
        small=small,
        q_stages=STAGES,
        do_stages=STAGES,
        ds_stages=STAGES,
        row_block=tile.m,
        dq_split="columns",
        dq_columns=dq_columns,
        dk_columns=d,
        dv_columns=d_v,
        registers=REGISTERS,
        deterministic=problem.deterministic,
    )
    return replace(finish(problem, draft, target), held_steps=_held_steps(problem))


def is_crowded(problem: Problem) -> bool:
    """Whether registers are few: beside derivatives or a mask's bits, or lengths with scores, an
    order or random bits."""
    beside = bool(problem.scores) or problem.deterministic or problem.dropout
    lengths = problem.varlen and beside
    return "softcap" in problem.scores or problem.attn_mask or lengths


def steps_of(extent: int) -> int:
    """The steps of a reduction along so many elements."""
    return -(-extent // STEP)


def _held_steps(problem: Problem) -> int:
    """Steps of a tile's keys that consumers have registers for: none beside random bits."""
    most = HELD_STEPS - problem.varlen
    beside = is_crowded(problem) or problem.dropout
    return 0 if beside else min(most, steps_of(problem.head_dim_qk))


def _prepare(problem: Problem, main: BackwardPlan) -> TurningPlan:
    key_columns = main.dq_columns * main.consumers
    image = max(image_bytes(problem), key_image_bytes(key_columns))
    return TurningPlan(
        arch=main.arch,
        family=PREPARE_8,
        tile=main.tile,
        key_columns=key_columns,
        smem_bytes=main.tile.n * 128 + image,
        threads=PREPARE_THREADS,
    )


def _convert(main: BackwardPlan) -> ConvertPlan:
    parts, split, columns = main.consumers, main.dq_split, main.dq_columns
    shape = (main.row_block, parts, split, columns, 0, 0, 0)
    return ConvertPlan(main.arch, CONVERT_8, *shape, CONVERT_THREADS)
