"""Choices of a backward's plan by products of warps: what is worth trying, and what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....fragments.program import learns
from ....spec.problem import Problem
from ....targets.target import Target
from ...base import KernelPlan, Schedule, Tile, lay_out, score_tile_bytes
from ...support.around import (
    CLEAR,
    CONVERT,
    CONVERT_THREADS,
    PREPARE_THREADS,
    ClearPlan,
    ConvertPlan,
    row_sums_plan,
)
from .plan import BACKWARD, OF_BIAS, OF_LEARNED, ROW_BLOCK, BiasPlan, LearnedPlan, Plan

WARP_THREADS = 32
ROW_TILE = 16  # rows of a product
BOX_COLUMNS, BOX_ROW_BYTES = 64, 128
LARGEST = 255  # registers of a thread
OTHER_REGISTERS = 36  # that hold no operand: places, loops, what copies need
MASKED_SCHEDULE = Schedule(False, True, kv_group_bytes=24 << 20, group_heads=32, tail_share=4)
FULL_SCHEDULE = Schedule(False, False, kv_group_bytes=24 << 20, group_heads=32, tail_share=0)


@dataclass(frozen=True)
class Choice:
    """The free choices of a plan; everything else follows from them and the problem."""

    key_warps: int
    query_warps: int
    keys: int
    queries: int
    stages: int
    ctas: int
    parts: int = 1
    late_dq: bool = False

    @property
    def warps(self) -> int:
        return self.key_warps * self.query_warps

    @property
    def score_queries(self) -> int:
        """Queries whose scores a warp has at once."""
        return self.queries // self.query_warps // self.parts

    @property
    def registers(self) -> int:
        """Registers a thread may have."""
        return min(LARGEST, (1 << 16) // (self.warps * WARP_THREADS * self.ctas) // 8 * 8)


# In the order of preference. Warps of 32 keys and 32 queries at a time: each fragment that they
# read serves two products; where they have all queries of their keys, nobody else reads weights.
# The more keys a tile has, the fewer additions to dQ there are. CTAs that share an SM multiply
# while others meet at barriers.
CHOICES = (
    Choice(4, 1, 128, 64, 2, 2, parts=2, late_dq=True),
    Choice(4, 1, 128, 64, 2, 2, parts=2),
    Choice(4, 2, 128, 64, 2, 1, late_dq=True),
    Choice(4, 2, 128, 64, 2, 1),
    Choice(2, 2, 64, 64, 2, 3),
    Choice(2, 2, 64, 64, 1, 3),
    Choice(2, 2, 64, 64, 2, 2),
    Choice(2, 2, 64, 64, 1, 2),
    Choice(2, 4, 64, 64, 2, 1, late_dq=True),
    Choice(2, 4, 64, 64, 2, 1),
    Choice(2, 4, 64, 64, 1, 1),
    Choice(2, 4, 32, 64, 1, 1),
    Choice(2, 2, 32, 64, 1, 1),
    Choice(2, 2, 32, 32, 1, 1),
    Choice(1, 4, 16, 64, 1, 1),
)


def boxes_of(head_dim: int) -> int:
    """Boxes of a row, each of 64 columns."""
    return -(-head_dim // BOX_COLUMNS)


def steps_of(head_dim: int) -> int:
    """Steps of 16 columns of a row."""
    return -(-head_dim // ROW_TILE)


def dq_row_warps(problem: Problem, choice: Choice) -> int:
    """Warps that divide the rows of dQ, whose columns the others divide: as many as leave the
    fewest products to the warp that has most, then the fewest fragments to read."""
    tiles = choice.queries // ROW_TILE

    def work(rows: int) -> tuple[int, int]:
        columns = -(-steps_of(problem.head_dim_qk) // (choice.warps // rows))
        return tiles // rows * columns, tiles // rows + columns

    return min((n for n in (2, 1, 4) if tiles % n == choice.warps % n == 0), key=work)


def operand_registers(problem: Problem, choice: Choice) -> int:
    """Registers a thread holds at once: sums of dK and dV, and either a block's scores with their
    gradients or a part of dQ, beside fragments."""
    keys = choice.keys // choice.key_warps
    columns = sum(
        -(-steps_of(d) // choice.query_warps) * ROW_TILE
        for d in (problem.head_dim_qk, problem.head_dim_v)
    )
    queries = choice.score_queries
    row_warps = dq_row_warps(problem, choice)
    columns_of_dq = -(-steps_of(problem.head_dim_qk) // (choice.warps // row_warps)) * ROW_TILE
    dq = choice.queries // row_warps * columns_of_dq
    held = max(2 * keys * queries, dq)
    fragments = 4 * max(keys // ROW_TILE, 2) + 4
    return (keys * columns + held) // WARP_THREADS + fragments


def regions(problem: Problem, choice: Choice) -> dict[str, int]:
    """Bytes of what shared memory holds, by name."""
    qk, v = boxes_of(problem.head_dim_qk), boxes_of(problem.head_dim_v)
    keys, queries = choice.keys * BOX_ROW_BYTES, choice.queries * BOX_ROW_BYTES
    return {
        "K": keys * qk,
        "V": keys * v,
        "Q": choice.stages * queries * qk,
        "Do": choice.stages * queries * v,
        **({} if choice.query_warps == 1 else {"P": keys}),
        "Ds": keys * (1 + choice.late_dq),
        **({"Bias": score_bytes(choice)} if problem.bias else {}),
    }


def score_bytes(choice: Choice) -> int:
    """Bytes of what scores read of a block, in parts of 16 keys and a warp's queries."""
    queries = choice.queries // choice.query_warps
    parts = choice.keys // ROW_TILE * choice.query_warps
    return parts * score_tile_bytes(queries, ROW_TILE)


def feasible(problem: Problem, target: Target) -> Iterator[Plan]:
    """Every plan that fits the target, the preferred first."""
    for choice in CHOICES:
        if plan := make_plan(problem, choice, target):
            yield plan


def make_plan(problem: Problem, choice: Choice, target: Target) -> Plan | None:
    """The plan of these choices; None where registers or shared memory do not hold it."""
    if problem.deterministic and choice.queries != ROW_BLOCK:
        return None  # blocks that have turns are those of the workspaces
    if problem.bias and choice.query_warps == 1:
        return None  # warps fetch what scores read for one part of their queries
    registers, limit = operand_registers(problem, choice), choice.registers - OTHER_REGISTERS
    rows = 2 * choice.stages * choice.queries * 4  # LSE and D
    smem = lay_out(regions(problem, choice), {"Rows": rows})
    smem_bytes = smem[-1].offset + smem[-1].bytes
    room = target.smem_share(choice.ctas)
    if registers > limit or smem_bytes > room:
        return None
    return Plan(
        arch=target.name,
        family=BACKWARD,
        tile=Tile(choice.queries, choice.keys),
        key_warps=choice.key_warps,
        query_warps=choice.query_warps,
        parts=choice.parts,
        dq_row_warps=dq_row_warps(problem, choice),
        stages=choice.stages,
        late_dq=choice.late_dq,
        ctas=choice.ctas,
        adds_quads=adds_quads(target),
        deterministic=problem.deterministic,
        schedule=MASKED_SCHEDULE if problem.masks else FULL_SCHEDULE,
        smem=smem,
        smem_bytes=smem_bytes,
        threads=choice.warps * WARP_THREADS,
        operand_registers=registers,
        why=explain(choice, registers, limit, smem_bytes, room),
    )


def adds_quads(target: Target) -> bool:
    """Whether one instruction adds four elements to sums in memory: from capability 9.0 on."""
    return target.capability >= (9, 0)


def explain(
    choice: Choice, registers: int, limit: int, smem_bytes: int, room: int
) -> tuple[str, ...]:
    """The plan's choices in prose, for people. room: bytes of shared memory a CTA may use."""
    keys, queries = choice.keys // choice.key_warps, choice.score_queries
    return (
        f"{choice.warps} warps, each with the scores of {keys} keys and {queries} queries at a "
        f"time: {registers} of {limit} operand registers a thread",
        f"{choice.stages} stage{'s' if choice.stages > 1 else ''} of Q and dO: {smem_bytes} of "
        f"{room} bytes of shared memory, {choice.ctas} CTA{'s' if choice.ctas > 1 else ''} an SM",
    )


def dq_columns(problem: Problem) -> int:
    """Columns of dQ's sums, whole steps of a product."""
    return steps_of(problem.head_dim_qk) * ROW_TILE


# Warps, and keys a tile, of the kernel of a bias's gradient, the preferred first.
BIAS_TILES = ((8, 64), (8, 32), (4, 64), (4, 32), (4, 16))


def bias_plans(problem: Problem, target: Target) -> Iterator[BiasPlan]:
    """The plan of the kernel of the bias's gradient, where there is a bias: the largest tile that
    fits."""
    if problem.bias:
        fitting = filter(None, (row_tile(problem, target, *tile, 1) for tile in BIAS_TILES))
        yield BiasPlan(target.name, OF_BIAS, **next(fitting))


# Warps, keys a tile and buffers of keys of the kernel of what a score learns.
LEARNED_TILES = tuple((*tile, stages) for tile in BIAS_TILES for stages in (2, 1))


def learned_plans(problem: Problem, target: Target) -> Iterator[LearnedPlan]:
    """The plan of the kernel of the gradients of what a score learns, where it does: the largest
    tile that fits, with the next keys under way where they fit as well."""
    if learns(problem.scores):
        made = ((row_tile(problem, target, *choice), choice[2]) for choice in LEARNED_TILES)
        fields, stages = next((fields, stages) for fields, stages in made if fields)
        yield LearnedPlan(target.name, OF_LEARNED, **fields, stages=stages)


def row_tile(
    problem: Problem, target: Target, warps: int, n: int, stages: int
) -> dict[str, Any] | None:
    """Fields of the plan of a kernel whose warps have 16 queries each, and `n` keys at a time, in
    so many buffers; None where they do not fit."""
    m, threads = warps * ROW_TILE, warps * WARP_THREADS
    rows, keys = m * BOX_ROW_BYTES, stages * n * BOX_ROW_BYTES
    qk, v = boxes_of(problem.head_dim_qk), boxes_of(problem.head_dim_v)
    sizes = {"Q": rows * qk, "Do": rows * v, "K": keys * qk, "V": keys * v}
    if problem.bias:
        sizes["Bias"] = warps * score_tile_bytes(ROW_TILE, n)
    smem = lay_out(sizes)
    smem_bytes = smem[-1].offset + smem[-1].bytes
    copied = n % (threads // 8) == 0  # by all threads at once
    if not copied or smem_bytes > target.cta_smem_bytes:
        return None
    return {"tile": Tile(m, n), "smem": smem, "smem_bytes": smem_bytes, "threads": threads}


def around(problem: Problem, main: Plan, target: Target) -> tuple[KernelPlan, ...]:
    """The plans of a problem's kernels, in the order of launch, with the main one among them."""
    columns = dq_columns(problem)
    clear = ClearPlan(
        main.arch,
        CLEAR,
        row_block=ROW_BLOCK,
        turns=problem.deterministic,
        zeros=False,
        made_tile=0,
        cta_blocks=1,
        threads=PREPARE_THREADS,
        dq_floats=ROW_BLOCK * columns,
    )
    convert = ConvertPlan(
        main.arch,
        CONVERT,
        row_block=ROW_BLOCK,
        parts=1,
        dq_split="quads" if main.adds_quads else "planes",
        dq_columns=columns,
        dk_columns=0,
        dv_columns=0,
        key_rows=0,
        threads=CONVERT_THREADS,
    )
    sums = (row_sums_plan(main.arch, ROW_BLOCK),) if problem.bias else ()
    beside = (*bias_plans(problem, target), *learned_plans(problem, target))
    return (clear, *sums, main, convert, *beside)
