"""Hopper, backward: limits, feasible plans, and what justified the heuristics.

Up to head dim 128 one kernel makes dQ, dK and dV with five products a block. Above, one warpgroup
cannot hold dK and dV of 64 keys, and dQ's additions would use up L2: two kernels, seven products.
Figures marked `measured` are from an H200 at 700 W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ....spec.problem import Problem
from ...base import Schedule, SmemRegion, Tile, has_order, lay_out, order_bytes, score_tile_bytes
from ..forward.plans import ARCH, BARRIER_BYTES, LIGHT_SCORES, SMEM_BYTES, _boxes

# Of struct Job, and more of tiles that come in waves and of those that have turns.
JOB_BYTES, JOB_BYTES_WAVES, JOB_BYTES_TURNS = 20, 4, 8
SMALL_BYTES = 3072  # of the fused kernel's LSE, D, barriers and job, at most
TERM_BYTES, PROGRESS_BYTES = 24, 8  # structs of the kernel of a bias's gradient
CONSUMERS = 2
ROWS_PER_CONSUMER = 64
# Registers a thread of the producer and of a consumer. The fused kernel's producer spills at 24;
# dQ's needs no more, and its consumers all that is left.
REGISTERS = {"sm90_bwd": (40, 232), "sm90_bwd_with_dbias": (40, 232), "sm90_bwd_dkv": (56, 224),
             "sm90_bwd_dq": (24, 240), "sm90_bwd_dbias": (40, 232)}  # fmt: skip
GATHER_REGISTERS = (56, 224)  # where the producer's warps copy rows themselves
# Of a bias's gradient, where the loader looks lengths up, copies rows or brings the widest.
BIAS_LENGTH_REGISTERS = (72, 216)
SMALL_REGISTERS = (56, 224)  # of the fused kernel up to head dim 32
# What spills in the kernel that makes all three gradients: features (`_features`) where all of them
# meet any of others. 240 registers a consumer would leave the producer 24, in which it spills.
FUSED_SPILLS = (
    ("deterministic dropout", "scores attn_mask varlen"),
    ("gather", "small heavy deterministic dropout attn_mask varlen"),
    ("arithmetic", "small"),
    ("arithmetic dropout", "varlen"),
    ("small uneven", "attn_mask"),
    ("small uneven dropout", "deterministic bias varlen"),
    ("bias", "varlen"),
    ("small bias", "unlike several deterministic attn_mask"),
    ("large bias", "arithmetic dropout"),
    ("large bias several", "attn_mask"),
)
# Of the dQ kernel, the values of dQ, S, dP and packed dS that a thread has registers for, and the
# most keys a block: the least of those whose features meet.
DQ_OPERANDS = (
    ("", 208),
    ("heavy", 200),
    ("dropout", 200),
    ("dropout attn_mask", 176),
    ("gather", 192),
    ("gather attn_mask heavy", 176),
    ("gather dropout bias", 176),
)
DQ_KEYS = (("", 128), ("heavy", 96), ("heavy varlen", 80))
# Of the dK and dV kernel, the most queries a block, the same way.
DKV_QUERIES = (
    ("", 64),
    ("wide several bias", 48),
    ("wide several dropout attn_mask", 32),
)
# Heads whose queries and dQ together fill L2 are worked on together, the shortest quarter of the
# tiles comes last: measured +2 to +7 % on causal masks over one head at a time or all at once.
CAUSAL_SCHEDULE = Schedule(True, True, kv_group_bytes=64 << 20, group_heads=16, tail_share=4)
FULL_SCHEDULE = Schedule(True, False, kv_group_bytes=64 << 20, group_heads=16, tail_share=0)
# Heads of fewer tiles of keys are worked on in waves even if no others share their keys, with none
# kept for the end: measured 1.03 and 1.01 at 8 and 4 tiles, 1.00 at 32, 0.98 at 128.
SHORT_HEAD = 16
# In an order of additions the tiles of a head move along its queries in step, so that L2 need not
# hold all of them, and fewer of them at once wait for each other.
ORDERED_GROUP_BYTES, ORDERED_GROUP_HEADS = 256 << 20, 32
# Under a window a tile follows the one before it by as many blocks as it has keys; where that is
# one of 128 queries, more heads keep them apart. Queries in use have to fit L2, besides: measured
# at 128 4 heads 1 % ahead of 8 under 512 keys once power sets the clocks, 1 % behind under 128,
# 2 and 6 level, 16 1 % behind; at 64 8, 16 and 64 heads 6, 2 and 4 % behind 32.
WINDOW_GROUP_HEADS, WINDOW_GROUP_BYTES = {64: 4, 128: 32}, 8 << 20

STAGED_COLUMNS = 32  # floats of dQ a row that leave room for a box of its 16-bit columns

PREPARE_THREADS = 256
MADE_BLOCKS = 8  # a CTA, where it has hardly anything to do with most
CONVERT_THREADS = 128  # those whose fragments a part of dQ's workspace is

Family = Literal["sm90_bwd", "sm90_bwd_with_dbias", "sm90_bwd_dkv", "sm90_bwd_dq"]
FUSED = ("sm90_bwd", "sm90_bwd_with_dbias")
DqSplit = Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class BackwardPlan:
    """One persistent kernel of a backward.

    `q_stages`, `do_stages`: buffers for blocks of queries and output gradients; in the dQ kernel
    for blocks of keys and values. `ds_stages`: buffers for dS. `dq_split`: consumers divide dQ's
    rows or its columns, `dq_columns` each; `dk_columns` and `dv_columns` of their accumulators are
    whole steps of 16, of which the copy engine stores the head dim's. `row_block`: queries a block
    of the workspaces. `deterministic`: tiles add to dQ in the order in which they are drawn; they
    visit the last block first, or where the last tile is drawn first, `descending`, the first.
    `completes`: the tile that has the last part of a block's dQ stores it, so that no other kernel
    converts it; tiles have an order for that. `waves`: where query heads share keys, or a head has
    fewer than `short_head` tiles, tiles are drawn in waves that keep to the same block of queries
    (scheduler/tile_order.cuh). `splits_heads`: where calls have few tiles, each query head of a
    group may have tiles of its own, which add to float32 sums of dK and dV in memory. `held_steps`:
    of 16 columns of a tile's keys that consumers have in registers, too. `frees_early`: output
    gradients are freed before queries, with which D comes then, and loaded before them. `makes_d`:
    consumers make D and LSE of a tile's first blocks, one each, where no other tile visits these
    before it; the kernel before makes the rest. `starts_early`: it may start before that one has
    ended, which it awaits where it needs it.
    """

    arch: str
    family: Family
    tile: Tile
    consumers: int
    q_stages: int
    do_stages: int
    ds_stages: int
    producer_registers: int
    consumer_registers: int
    dq_split: DqSplit
    dq_columns: int
    dk_columns: int
    dv_columns: int
    row_block: int
    deterministic: bool
    completes: bool
    descending: bool
    waves: bool
    short_head: int
    splits_heads: bool
    held_steps: int
    frees_early: bool
    makes_d: bool
    starts_early: bool
    schedule: Schedule
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int

    @property
    def fused(self) -> bool:
        """Whether it makes all three gradients."""
        return self.family in FUSED

    @property
    def adds_bias(self) -> bool:
        """Whether tiles add their dS to the gradient of the bias, too, those of one sequence after
        those of the one before."""
        return self.family == "sm90_bwd_with_dbias"

    @property
    def dq_floats(self) -> int:
        """Floats of dQ's workspace for one block of queries."""
        return self.consumers * ROWS_PER_CONSUMER * self.dq_columns

    @property
    def dkv_floats(self) -> int:
        """Those of dK's and dV's for one tile of keys, where heads of a group have their own, and
        as many counts of turns as there are warpgroups."""
        columns = self.dk_columns + self.dv_columns
        return self.consumers * (ROWS_PER_CONSUMER * columns + 1) * self.splits_heads

    @property
    def orders_few(self) -> bool:
        """As of a forward's plan."""
        return has_order(self.smem)


@dataclass(frozen=True)
class PreparePlan:
    """The kernel before: D and LSE in blocks of `row_block` queries. `turns`:
    whether it zeroes the counts of tiles that have added to each block of dQ; `zeros`: and the dQ
    of blocks that no tile visits, since no kernel converts it. `made_tile`: keys of a tile whose
    consumers make D themselves where they are first, 0 where there are none. `cta_blocks`: of the
    blocks that a CTA has."""

    arch: str
    family: Literal["bwd_prepare"]
    row_block: int
    turns: bool
    zeros: bool
    made_tile: int
    cta_blocks: int
    threads: int


@dataclass(frozen=True)
class ConvertPlan:
    """The kernel after the fused one: dQ of a block in `parts`, each 64 rows of `dq_columns`; and
    where that one may sum dK and dV, too, 64 keys of so many columns, else 0, `key_rows` a tile."""

    arch: str
    family: Literal["bwd_convert"]
    row_block: int
    parts: int
    dq_split: DqSplit
    dq_columns: int
    dk_columns: int
    dv_columns: int
    key_rows: int
    threads: int


@dataclass(frozen=True)
class BiasPlan:
    """The kernel of a bias's gradient, a tile of it a CTA at a time. `stages`: buffers for queries
    with keys, and for output gradients with values, in turn."""

    arch: str
    family: Literal["sm90_bwd_dbias"]
    tile: Tile
    consumers: int
    stages: int
    producer_registers: int
    consumer_registers: int
    row_block: int
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int


@dataclass(frozen=True)
class RowSumsPlan:
    """The kernel that finds the sums of rows whose LSE, of a large bias, shows none: a warp has 16
    rows of a block of `row_block` queries."""

    arch: str
    family: Literal["bwd_row_sums"]
    row_block: int
    threads: int


KernelPlan = PreparePlan | BackwardPlan | ConvertPlan | BiasPlan | RowSumsPlan


def plans(problem: Problem) -> tuple[KernelPlan, ...]:
    """The preferred plan of each kernel, in the order of launch; none where nothing fits."""
    if problem.dtype_q not in ("fp16", "bf16") or problem.dtype_o != problem.dtype_q:
        return ()
    if fuses(problem):
        fused = make_fused(problem)
        converts = () if fused.completes else (_convert(fused),)
        return (
            _prepare(fused),
            *_row_sums(problem, fused.row_block),
            fused,
            *_adding(problem),
            *converts,
            *_biases(problem, fused.row_block),
        )
    dkv = next(feasible_dkv(problem), None)
    dq = dkv and next(feasible_dq(problem, dkv.row_block), None)
    if not (dkv and dq):
        return ()
    rows = dkv.row_block
    return (_prepare(dkv), *_row_sums(problem, rows), dkv, dq, *_biases(problem, rows))


def _prepare(main: BackwardPlan) -> PreparePlan:
    turns, zeros = main.dq_floats > 0, main.completes
    made, blocks = (main.tile.n, MADE_BLOCKS) if main.makes_d else (0, 1)
    threads = PREPARE_THREADS
    return PreparePlan(ARCH, "bwd_prepare", main.row_block, turns, zeros, made, blocks, threads)


def _row_sums(problem: Problem, row_block: int) -> Iterator[RowSumsPlan]:
    """The plan of the kernel for rows of large scores, which a bias may have."""
    if problem.bias:
        yield RowSumsPlan(ARCH, "bwd_row_sums", row_block, 2 * row_block)


def _convert(main: BackwardPlan) -> ConvertPlan:
    split, columns = main.dq_split, main.dq_columns
    rows, parts = main.row_block, main.consumers
    dk, dv = (main.dk_columns, main.dv_columns) if main.splits_heads else (0, 0)
    keys = main.tile.n if main.splits_heads else 0
    return ConvertPlan(
        ARCH, "bwd_convert", rows, parts, split, columns, dk, dv, keys, CONVERT_THREADS
    )


def fuses(problem: Problem) -> bool:
    """Whether one kernel makes all three gradients: both accumulators of 64 keys in registers,
    and a box of 64 columns of dQ, or all of them, for each consumer."""
    d, largest = problem.head_dim_qk, max(problem.head_dim_qk, problem.head_dim_v)
    if largest > 128 or d <= 64 < largest:
        return False
    found = _features(problem)
    return not any(
        found.issuperset(these.split()) and not found.isdisjoint(others.split())
        for these, others in FUSED_SPILLS
    )


def _features(problem: Problem) -> frozenset[str]:
    """What takes registers. Small: blocks of 128 queries; uneven: of these all but equal head dims
    up to 32; heavy: scores that are more than a multiply-add; arithmetic: one that is no bias."""
    d, d_v, scores = problem.head_dim_qk, problem.head_dim_v, problem.scores
    heavy = set(scores) - LIGHT_SCORES
    features = {
        "small": max(d, d_v) <= 64,
        "large": max(d, d_v) > 64,
        "uneven": d > 32 or d != d_v,
        "unlike": d != d_v,
        "wide": d_v > 192,
        "scores": bool(scores),
        "several": len(scores) > 1,
        "heavy": bool(heavy),
        "arithmetic": not all(name.endswith("_bias") for name in heavy),
        "bias": problem.bias,
        "deterministic": problem.deterministic,
        "dropout": problem.dropout,
        "attn_mask": problem.attn_mask,
        "varlen": problem.varlen,
        "gather": problem.gather,
    }
    return frozenset(name for name, is_there in features.items() if is_there)


def _least(limits: Iterable[tuple[str, int]], features: frozenset[str]) -> int:
    return min(limit for these, limit in limits if features.issuperset(these.split()))


def _adding(problem: Problem) -> Iterator[BackwardPlan]:
    """The plan of the fused kernel for calls whose bias's gradient it can make, too, where there is
    room: dS lies in shared memory as the copy engine adds it."""
    others = problem.deterministic or problem.dropout or problem.attn_mask or problem.gather
    if problem.bias and not others:
        made = make_fused(problem, adds_bias=True)
        if made.smem_bytes <= SMEM_BYTES:
            yield made


def make_fused(problem: Problem, *, adds_bias: bool = False) -> BackwardPlan:
    """128 keys and, up to head dim 64, 128 queries, else 64: as many as registers hold. 80 queries
    at 128, as others have, measured 4 % behind."""
    rows = max(problem.head_dim_qk, problem.head_dim_v) <= 64
    tile = Tile(128 if rows else 64, ROWS_PER_CONSUMER * CONSUMERS)
    d, d_v = _whole_steps(problem.head_dim_qk), _whole_steps(problem.head_dim_v)
    # Small accumulators of unlike sizes spill: equal ones, clipped by the copy engine, do not.
    dk_columns, dv_columns = (64, 64) if rows and d != d_v else (d, d_v)
    crowded = problem.dropout or problem.attn_mask or problem.bias or problem.gather
    # Under a window, where tiles have few blocks, a kernel that converts dQ takes an eighth of the
    # time. Without an order anyway, wide windows would lose up to a tenth by one.
    completes = problem.deterministic and "window" in problem.masks and not crowded
    dq_columns = (max(d, STAGED_COLUMNS) if completes else d) if rows else 64
    stages = {"q_stages": 2, "do_stages": 2, "ds_stages": 2}
    sizes = {
        **_operand_bytes(problem, tile, 2, 2),
        "Ds": 2 * tile.m * CONSUMERS * 128,
        "Dq": CONSUMERS * ROWS_PER_CONSUMER * dq_columns * 4,
        **({"Bias": CONSUMERS * score_tile_bytes(tile.m, 64)} if problem.bias else {}),
    }
    # With a place of its own for dV the next tile's values come while this one's end is worked on.
    if not crowded and sum(sizes.values()) + sizes["V"] <= SMEM_BYTES - SMALL_BYTES:
        sizes["Dv"] = sizes["V"]
    if adds_bias:
        sizes["Blank"] = tile.m * 128  # zeros for what no tile visits
    makes_d = _makes_d(problem, tile, completes)
    barriers = 24 + 2 * problem.bias + 2 * completes + 7 * makes_d
    small = {"Lse": 2 * tile.m * 4, "D": 2 * tile.m * 4, "Barriers": barriers * BARRIER_BYTES}
    return _finish(
        problem, "sm90_bwd_with_dbias" if adds_bias else "sm90_bwd",
        tile, sizes, small, stages, row_block=tile.m,
        dq_split="rows" if rows else "columns", dq_columns=dq_columns, dk_columns=dk_columns,
        dv_columns=dv_columns, deterministic=problem.deterministic, completes=completes,
        makes_d=makes_d,
        registers=SMALL_REGISTERS if max(dk_columns, dv_columns) <= 32 else None,
    )  # fmt: skip


def feasible_dkv(problem: Problem) -> Iterator[BackwardPlan]:
    """dK and dV of 64 keys, a warpgroup each. Measured at 256: 48 queries in three stages 10 %
    ahead of 64 in two; at 192/128, three stages 1.9 x two, four 8 % ahead of three."""
    most = _least(DKV_QUERIES, _features(problem))
    for m, stages in ((64, 4), (64, 3), (48, 3), (64, 2), (32, 3), (32, 2)):
        tile = Tile(m, ROWS_PER_CONSUMER)
        sizes = {
            **_operand_bytes(problem, tile, stages, stages),
            "Weights": 2 * tile.m * tile.n * 2,
            **({"Bias": 4 * score_tile_bytes(m, 16)} if problem.bias else {}),
        }
        rows = stages * m * 4
        small = {"Lse": rows, "D": rows, "Barriers": (10 + 4 * stages) * BARRIER_BYTES}
        counts = {"q_stages": stages, "do_stages": stages, "ds_stages": 0}
        made = _finish(problem, "sm90_bwd_dkv", tile, sizes, small, counts, row_block=m)
        if made.smem_bytes <= SMEM_BYTES and m <= most:
            yield made


def feasible_dq(problem: Problem, row_block: int) -> Iterator[BackwardPlan]:
    """dQ of 128 queries. A third stage of keys is worth 30 % of the block (measured at 192/128:
    80 keys in two stages are 27 % behind 64 in three; at 256, 48 in three 22 % behind
    64 in two)."""
    features = _features(problem)
    limit = _least(DQ_OPERANDS, features)
    choices = [
        (n * (1.3 if k > 2 else 1.0) * (1.05 if v > 1 else 1.0), n, k, v)
        for n in range(_least(DQ_KEYS, features), 16, -16)
        for k in (3, 2)
        for v in (2, 1)
        if problem.head_dim_qk // 2 + n + n // 4 <= limit
    ]
    for _, n, k_stages, v_stages in sorted(choices, reverse=True):
        tile = Tile(ROWS_PER_CONSUMER * CONSUMERS, n)
        qk, v = 128 * _boxes(problem.head_dim_qk), 128 * _boxes(problem.head_dim_v)
        sizes = {"Q": tile.m * qk, "Do": tile.m * v, "K": k_stages * n * qk, "V": v_stages * n * v}
        sizes |= {"Bias": 4 * CONSUMERS * score_tile_bytes(16, n)} if problem.bias else {}
        small = {"Barriers": (4 + 2 * (k_stages + v_stages)) * BARRIER_BYTES}
        counts = {"q_stages": k_stages, "do_stages": v_stages, "ds_stages": 0}
        made = _finish(problem, "sm90_bwd_dq", tile, sizes, small, counts, row_block=row_block)
        if made.smem_bytes <= SMEM_BYTES:
            yield made


def _biases(problem: Problem, row_block: int) -> Iterator[BiasPlan]:
    """The plan of the kernel of the bias's gradient, where there is a bias: the largest tile of 128
    rows that fits, then as many buffers as do."""
    if not problem.bias:
        return
    # Random words, a mask's bits and further scores take the room of some keys.
    crowded = problem.dropout or problem.attn_mask or len(problem.scores) > 1
    # So does the loader where lengths vary, or that copies rows itself.
    most = ((128, 112), (96, 80))[bool(crowded)][problem.varlen or problem.gather]
    sizes = (n for n in (128, 112, 96, 80, 64, 32) if n == most or n < most and n % 32 == 0)
    choices = [(n, stages) for n in sizes for stages in (4, 3, 2)]
    yield next(plan for choice in choices if (plan := _make_bias(problem, row_block, *choice)))


def _make_bias(problem: Problem, row_block: int, n: int, stages: int) -> BiasPlan | None:
    tile = Tile(ROWS_PER_CONSUMER * CONSUMERS, n)
    boxes = max(_boxes(problem.head_dim_qk), _boxes(problem.head_dim_v))
    sizes = {
        "Stages": stages * (tile.m + n) * 128 * boxes,
        "Bias": 4 * CONSUMERS * score_tile_bytes(16, n),
    }
    barriers = 2 * stages + 4 * CONSUMERS + 4  # of a warp's part of the bias, of what is drawn
    small = {"Barriers": barriers * BARRIER_BYTES, "Terms": stages * TERM_BYTES + PROGRESS_BYTES}
    regions = lay_out(sizes, small)
    smem_bytes = regions[-1].offset + regions[-1].bytes
    if smem_bytes > SMEM_BYTES:
        return None
    loads_more = problem.varlen or problem.gather or boxes > 3
    producer, consumer = BIAS_LENGTH_REGISTERS if loads_more else REGISTERS["sm90_bwd_dbias"]
    return BiasPlan(
        arch=ARCH,
        family="sm90_bwd_dbias",
        tile=tile,
        consumers=CONSUMERS,
        stages=stages,
        producer_registers=producer,
        consumer_registers=consumer,
        row_block=row_block,
        smem=regions,
        smem_bytes=smem_bytes,
        threads=128 * (CONSUMERS + 1),
    )


def _whole_steps(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def _operand_bytes(problem: Problem, tile: Tile, q_stages: int, do_stages: int) -> dict[str, int]:
    qk, v = 128 * _boxes(problem.head_dim_qk), 128 * _boxes(problem.head_dim_v)
    return {
        "Q": q_stages * tile.m * qk,
        "Do": do_stages * tile.m * v,
        "K": tile.n * qk,
        "V": tile.n * v,
    }


def _splits_heads(problem: Problem, tile: Tile) -> bool:
    """Whether there is a place for sums of dK and dV, and there are registers to find it."""
    windowed = "window" in problem.masks
    if problem.gather or problem.bias or windowed and problem.deterministic:
        return False
    if (problem.q_seq == "packed") != (problem.kv_seq == "packed"):
        return False
    beside_alibi = windowed or problem.varlen and (problem.attn_mask or len(problem.scores) > 1)
    spills = "alibi" in problem.scores and beside_alibi
    spills = spills or problem.dropout and (tile.m > 64 or problem.attn_mask)
    return not spills


def _held_steps(problem: Problem, tile: Tile, completes: bool) -> int:
    """As many as gain with blocks of 64 queries. Measured at 128, 112, 96 and 80: three 1.01 to
    1.05, more no better; no gain with dropout, a mask's bits, a bias, a softcap or in an order of
    additions without a window."""
    features = _features(problem)
    ordered = problem.deterministic and not completes
    if tile.m > 64 or ordered or features & {"heavy", "dropout", "attn_mask", "gather"}:
        return 0
    if features >= {"unlike", "varlen"}:
        return 0  # no registers
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    few = largest > 112 and (problem.scores or completes and problem.varlen)  # registers
    return 2 if few else 3


def _makes_d(problem: Problem, tile: Tile, completes: bool) -> bool:
    """Measured 1.00 to 1.06 of whole calls, most where these are short, and 1.00 to 1.04 more since
    O comes by the copy engine."""
    return completes and tile.m == 64 and not problem.varlen


def _frees_early(problem: Problem, tile: Tile, completes: bool) -> bool:
    """Measured with 128 queries a block 1.01 to 1.04, 0.98 where tiles complete dQ; with 64 level,
    or behind beside held keys."""
    return tile.m > 64 and not (completes or problem.gather)


def _finish(
    problem: Problem,
    family: Family,
    tile: Tile,
    sizes: dict[str, int],
    small: dict[str, int],
    stages: dict[str, int],
    *,
    row_block: int,
    dq_split: DqSplit = "none",
    dq_columns: int = 0,
    dk_columns: int = 0,
    dv_columns: int = 0,
    registers: tuple[int, int] | None = None,
    deterministic: bool = False,
    completes: bool = False,
    makes_d: bool = False,
) -> BackwardPlan:
    """The plan with its shared memory laid out."""
    producer, consumer = registers or REGISTERS[family]
    if problem.gather:
        producer, consumer = GATHER_REGISTERS
    schedule = CAUSAL_SCHEDULE if problem.masks else FULL_SCHEDULE
    descending = family == "sm90_bwd_dq" and schedule.longest_first
    if deterministic:
        size, heads = ORDERED_GROUP_BYTES, ORDERED_GROUP_HEADS
        schedule = replace(schedule, kv_group_bytes=size, group_heads=heads)
        if "window" in problem.masks:
            # The short tiles at a sequence's end first, since they end with it, too: those before
            # them in the other order had the same block to begin with, each waiting for another.
            descending = True
            size, heads = WINDOW_GROUP_BYTES, WINDOW_GROUP_HEADS[tile.m]
            schedule = replace(schedule, kv_group_bytes=size, group_heads=heads, tail_share=0)
    # Measured with 8 query heads a key head: 1.09 to 1.17 for 2 sequences of 8k, 1.41 to 1.46 for
    # one of 4k; with 4 heads 1.01 to 1.03 for 4 of 4k, 1.10 for one of 32k. At 256, where nothing
    # is summed in memory, 1.01 to 1.02, but heads alone were behind in two of three runs.
    waves = family == "sm90_bwd" and problem.masks == ("causal",)
    # Packed tiles in an order keep theirs: where many sequences stand among those of their length
    # is chance, and which way a tile goes decides bits.
    waves = waves and not (problem.bias or problem.varlen and deterministic)
    waves = waves and not (problem.varlen and len(problem.scores) > 1)  # would spill
    job = JOB_BYTES + JOB_BYTES_WAVES * waves + JOB_BYTES_TURNS * completes
    order = {"Order": order_bytes(0)} if problem.varlen else {}
    regions = lay_out(sizes, {**small, "Job": job, **order})
    return BackwardPlan(
        arch=ARCH,
        family=family,
        tile=tile,
        consumers=CONSUMERS,
        **stages,
        producer_registers=producer,
        consumer_registers=consumer,
        dq_split=dq_split,
        dq_columns=dq_columns,
        dk_columns=dk_columns,
        dv_columns=dv_columns,
        row_block=row_block,
        deterministic=deterministic,
        completes=completes,
        descending=descending,
        waves=waves,
        short_head=SHORT_HEAD if waves and not (deterministic or problem.varlen) else 0,
        splits_heads=family == "sm90_bwd" and _splits_heads(problem, tile),
        held_steps=_held_steps(problem, tile, completes) if family in FUSED else 0,
        frees_early=family in FUSED and _frees_early(problem, tile, completes),
        makes_d=makes_d,
        starts_early=family != "sm90_bwd_dq" and not problem.gather,
        schedule=schedule,
        smem=regions,
        smem_bytes=regions[-1].offset + regions[-1].bytes,
        threads=128 * (CONSUMERS + 1),
    )
