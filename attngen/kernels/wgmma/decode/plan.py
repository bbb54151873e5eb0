"""Plans of a decode: few queries a sequence, so that reading the keys is all that counts."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import KernelPlan, SmemRegion, Tile, TiledPlan, lay_out
from ...support.combine import combine_plan
from ..shared import BARRIER_BYTES, PREFIX, boxes_of

DECODE = f"{PREFIX}decode"

ROWS = 64
WARPGROUP_THREADS = 128
WARPGROUP_COLUMNS = 256  # of float32 output, of which a thread holds half as many registers
LOADER_THREADS = 32
# Two warpgroups and a loader warp would have 168 registers a thread, since three of the warps share
# a quarter of the SM; a loader of a whole warpgroup can give its own away.
LOADER_REGISTERS, CONSUMER_REGISTERS = 24, 240
# Operands in registers that leave room for addresses and row state, by the CTAs that share an SM
# and the warpgroups of each.
OPERANDS = {(1, 1): 208, (2, 1): 148, (1, 2): 192}
OPERANDS_WIDENED = {(1, 1): 192, (2, 1): 128, (1, 2): 176}  # beside what is being widened
# CTAs an SM, keys a block, stages, in the order of preference: two CTAs cover each other's ends.
# Three stages of 64 keys are 1 to 3 % faster than two where a CTA has an SM to itself, and 0.4 to
# 1.6 % slower where two share it, which use two of them (measured at 128; four are slower, as are
# blocks of 32 keys, or of 128 in three stages).
CHOICES = ((2, 128, 2), (2, 64, 3), (2, 64, 2), (1, 64, 3), (1, 64, 2), (1, 32, 3), (1, 32, 2))
# Keys and values of 8 bits: the same beside what they are widened to.
CHOICES_WIDENED = (
    *((2, 128, 2), (2, 64, 4), (2, 64, 3), (2, 64, 2)),
    *((1, 64, 4), (1, 64, 3), (1, 64, 2), (1, 32, 4), (1, 32, 3), (1, 32, 2)),
)
# CTAs an SM that take what memory gives, where each reads keys of its own (measured at 128: 96 on
# 132 SMs take 0.93 of what 128 do, 80 take 0.79; in blocks of 128 keys, at 64, 96 take 0.80 and 80
# 0.67 of what 224 do). Where keys are widened, or a row has more columns
# of output than a warpgroup holds, arithmetic binds, and no place may be empty.
BUSY_CTAS, LONG_BUSY_CTAS = 0.76, 0.92
PACE_BYTES = 16  # what CTAs have read, as each sees it


@dataclass(frozen=True)
class DecodePlan(TiledPlan):
    """The kernel that reads the keys. `ctas`: on one SM; `busy_ctas`: those of them that keep the
    memory busy, where each reads keys of its own. `stages`: buffers of K, and of V.
    `consumers`: warpgroups, each of which has `columns` of the output, of two the second what is
    left; registers: of a thread, where there are several and the loader, then a warpgroup, gives
    some of its own away."""

    arch: str
    family: str
    tile: Tile
    stages: int
    ctas: int
    busy_ctas: float
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int
    columns: int
    consumers: int = 1
    loader_registers: int = 0
    consumer_registers: int = 0


def plans(problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
    """The plans of the kernel that reads the keys and of the one that joins; none where nothing
    fits."""
    choices = CHOICES_WIDENED if problem.widens else CHOICES
    found = next(filter(None, (make_plan(problem, target, *choice) for choice in choices)), None)
    if not found:
        return ()
    return found, combine_plan(problem, target)


def make_plan(
    problem: Problem, target: Target, ctas: int, block: int, stages: int
) -> DecodePlan | None:
    """The plan of these choices; None where shared memory or registers do not hold it."""
    boxes_qk, boxes_v = boxes_of(problem.head_dim_qk), boxes_of(problem.head_dim_v)
    consumers = -(-problem.head_dim_v // WARPGROUP_COLUMNS)
    columns = problem.head_dim_v if consumers == 1 else 64 * -(-boxes_v // consumers)
    # A box that does not exist is read behind the last one.
    behind = block * 128 * (consumers > 1 and consumers * columns > 64 * boxes_v)
    size = DTYPE_BYTES[problem.dtype_kv]
    wide = {"WideK": block * 128 * boxes_qk, "WideV": block * 128 * boxes_v + behind}
    # Where CTAs may have an SM each, and have enough on the way.
    paces = ctas > 1 and not problem.widens and problem.q_seq != "packed"
    regions = lay_out(
        {
            "Q": ROWS * 128 * boxes_qk,
            "K": stages * block * 128 * boxes_of(problem.head_dim_qk, size),
            "V": stages * block * 128 * boxes_of(problem.head_dim_v, size)
            + (0 if problem.widens else behind),
            **(wide if problem.widens else {}),
            "Barriers": BARRIER_BYTES * 4 * stages,
        },
        {"Pace": PACE_BYTES} if paces else {},
    )
    smem_bytes = regions[-1].offset + regions[-1].bytes
    registers = columns // 2 + block // 2 + block // 4  # output, scores, weights
    if smem_bytes > target.smem_share(ctas):
        return None
    limits = OPERANDS_WIDENED if problem.widens else OPERANDS
    limit = limits.get((ctas, consumers), 0)
    if problem.widens and len(problem.scores) > 1:
        limit -= 16  # found by spills
    if registers > limit:
        return None
    several = consumers > 1
    busy = LONG_BUSY_CTAS if block == 128 else BUSY_CTAS
    loader_threads = WARPGROUP_THREADS if several else LOADER_THREADS
    return DecodePlan(
        arch=target.name,
        family=DECODE,
        tile=Tile(ROWS, block),
        stages=stages,
        ctas=ctas,
        busy_ctas=float(ctas) if problem.widens or several else busy,
        smem=regions,
        smem_bytes=smem_bytes,
        threads=consumers * WARPGROUP_THREADS + loader_threads,
        columns=columns,
        consumers=consumers,
        loader_registers=LOADER_REGISTERS * several,
        consumer_registers=CONSUMER_REGISTERS * several,
    )
