"""Hopper (sm_90a): limits, feasible tiles, and the heuristics with what justified them.

Figures marked `measured` are from an H200 at 700 W; docs/performance.md has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..problem import DTYPE_BYTES, Problem
from .base import Pipeline, Plan, Schedule, Tile, lay_out

ARCH = "sm_90a"
SMEM_BYTES = 232_448  # 227 KB a CTA may use
JOB_BYTES = 24  # struct Job of the forward
BARRIER_BYTES = 8
KV_STAGES = 2
# Registers a thread: setmaxnreg moves the 504 of a launch (3 warpgroups) or its 512 (4) between
# roles; a producer of 24 spills in some head-dim pairs, and no consumer needs more than 232.
REGISTERS = {2: (40, 232), 3: (32, 160)}
# Live accumulators (output, scores, packed weights) that leave room for addresses and row state.
ACCUMULATORS = {2: 204, 3: 128}
ROWS_PER_CONSUMER = 64
# Groups of 32 heads leave four SMs a head to share its keys, of 64 MB still mostly hit L2: measured
# best or within 1 % from 1k to 16k tokens; smaller groups lose to the imbalance at their ends.
CAUSAL_SCHEDULE = Schedule(True, True, kv_group_bytes=64 << 20, group_heads=32, tail_share=4)
FULL_SCHEDULE = Schedule(False, False, kv_group_bytes=0, group_heads=1, tail_share=0)


def accumulator_registers(problem: Problem, block: int) -> int:
    """Registers a consumer thread holds at once: output, a block's scores, its 16-bit weights."""
    return problem.head_dim_v // 2 + block // 2 + block // 4


def smem_sizes(problem: Problem, tile: Tile, stages: int, over_q: bool) -> dict[str, int]:
    """Bytes of each shared-memory region; head dims round up to whole 128-byte boxes."""
    row_bytes_qk = -(-problem.head_dim_qk * DTYPE_BYTES[problem.dtype_q] // 128) * 128
    row_bytes_v = -(-problem.head_dim_v * DTYPE_BYTES[problem.dtype_kv] // 128) * 128
    consumers = tile.m // ROWS_PER_CONSUMER
    staged = problem.dtype_o != "fp32" and not over_q
    return {
        "Q": tile.m * row_bytes_qk,
        "K": stages * tile.n * row_bytes_qk,
        "V": stages * tile.n * row_bytes_v,
        **({"O": tile.m * row_bytes_v} if staged else {}),
        "Barriers": BARRIER_BYTES * (2 * consumers + 4 * stages + 2),
        "Job": JOB_BYTES,
    }


def feasible(problem: Problem) -> Iterator[Plan]:
    """Every plan that fits shared memory and registers, the preferred first."""
    if problem.head_dim_qk <= 64 and problem.head_dim_v <= 64:
        # Three warpgroups of 64 rows: measured +16 to +36 % over two at d64.
        preferred, other = 3, 2
    else:
        preferred, other = 2, 3
    causal = bool(problem.masks)
    largest = 128 if causal else 128
    for consumers in (preferred, other):
        for block in range(largest, 16, -16):
            for over_q in (False, True):
                plan = _plan(problem, Tile(ROWS_PER_CONSUMER * consumers, block), over_q)
                if plan is not None:
                    yield plan


def _plan(problem: Problem, tile: Tile, over_q: bool) -> Plan | None:
    consumers = tile.m // ROWS_PER_CONSUMER
    registers = accumulator_registers(problem, tile.n)
    if registers > ACCUMULATORS[consumers]:
        return None
    if over_q and (
        problem.dtype_o == "fp32" or -(-problem.head_dim_v // 64) > -(-problem.head_dim_qk // 64)
    ):
        return None
    regions = lay_out(smem_sizes(problem, tile, KV_STAGES, over_q))
    smem_bytes = regions[-1].offset + regions[-1].bytes
    if smem_bytes > SMEM_BYTES:
        return None
    producer, consumer = REGISTERS[consumers]
    causal = bool(problem.masks)
    # d256 runs one block of 80 keys in about the time of its rescale: measured +5 to +7 %;
    # at 64 and 128 the vote costs more than it saves (-2 to -18 %).
    lazy = 8 if problem.head_dim_v > 192 else 0
    return Plan(
        arch=ARCH,
        family="sm90_fwd",
        tile=tile,
        pipeline=Pipeline(consumers, KV_STAGES, producer, consumer, over_q),
        schedule=CAUSAL_SCHEDULE if causal else FULL_SCHEDULE,
        lazy_rescale_log2=lazy,
        smem=regions,
        smem_bytes=smem_bytes,
        threads=128 * (consumers + 1),
        accumulator_registers=registers,
        why=_why(problem, tile, registers, smem_bytes, over_q, causal),
    )


def _why(
    problem: Problem, tile: Tile, registers: int, smem_bytes: int, over_q: bool, causal: bool
) -> tuple[str, ...]:
    consumers = tile.m // ROWS_PER_CONSUMER
    limit = ACCUMULATORS[consumers]
    return (
        f"{consumers} consumer warpgroups of 64 query rows take turns at the tensor cores",
        f"{tile.n} keys a block: {registers} of {limit} accumulator registers a thread",
        f"{KV_STAGES} K/V stages: {smem_bytes} of {SMEM_BYTES} bytes of shared memory, 1 CTA an SM",
        "output staged over Q: its own buffer would not fit"
        if over_q
        else "output staged in its own buffer, so that the next tile's Q loads early",
        "tiles drawn from a counter, longest rows first"
        if causal
        else "equal tiles, strided over the SMs",
    )
