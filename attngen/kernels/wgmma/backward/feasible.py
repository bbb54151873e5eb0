"""Plans of a backward's main kernels: tiles, stages and shared memory.

Up to head dim 128 one kernel makes dQ, dK and dV with five products a block. Above, one warpgroup
cannot hold dK and dV of 64 keys, and dQ's additions would use up L2: two kernels, seven products,
or five where dS are left in memory (kept.py).
Figures marked `measured` are from an H200 at 700 W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....fragments.score_lines import turned_lines_in
from ....spec.problem import Problem
from ....targets.target import Target
from ...base import Schedule, Tile, lay_out, order_bytes, score_tile_bytes
from ...support.around import DqSplit
from ..shared import BARRIER_BYTES, DRAWN_BYTES, boxes_of
from .kept import KEPT_ROWS, keeps_ds
from .plan import (
    MAIN,
    MAIN_8,
    OF_KEPT,
    OF_KEYS,
    OF_QUERIES,
    ROWS_PER_CONSUMER,
    WITH_BIAS,
    WITH_SUMS,
    BackwardPlan,
)
from .registers import (
    DKV_QUERIES,
    DQ_KEYS,
    DQ_OPERANDS,
    GATHER_REGISTERS,
    REGISTERS,
    SMALL_REGISTERS,
    features_of,
    least,
    pair_registers,
)
from .wide import AHEAD_BLOCKS, AHEAD_OPERANDS, BLOCKS, cta_columns, is_wide, sends_ahead

# Of struct Job, and more of tiles that come in waves and of those that have turns.
JOB_BYTES, JOB_BYTES_WAVES, JOB_BYTES_TURNS = 20, 4, 8
SMALL_BYTES = 3072  # of the fused kernel's LSE, D, barriers and job, at most
CONSUMERS = 2
# Heads whose queries and dQ together fill L2 are worked on together, the shortest quarter of the
# tiles comes last: measured +2 to +7 % on causal masks over one head at a time or all at once.
CAUSAL_SCHEDULE = Schedule(True, True, kv_group_bytes=64 << 20, group_heads=16, tail_share=4)
FULL_SCHEDULE = Schedule(True, False, kv_group_bytes=64 << 20, group_heads=16, tail_share=0)
# In 8 bits, where a block takes less time, half of that: measured at 128 without a mask +2 % for
# one sequence of 16k and 4 of 4k, -1 and +1 % under a causal mask, which keeps 64 MB.
FULL_SCHEDULE_8 = replace(FULL_SCHEDULE, kv_group_bytes=32 << 20)
# Heads of fewer tiles of keys are worked on in waves even if no others share their keys, with none
# kept for the end: measured 1.03 and 1.01 at 8 and 4 tiles, 1.00 at 32, 0.98 at 128.
SHORT_HEAD = 16
# In an order of additions the tiles of a head move along its queries in step, so that L2 need not
# hold all of them, and fewer of them at once wait for each other.
ORDERED_GROUP_BYTES, ORDERED_GROUP_HEADS = 256 << 20, 32
# In 8 bits fewer heads, whose tiles follow each other sooner. Measured at 128, 16 heads, full and
# causal: 8 heads 1.38 and 1.04 times 32 for one sequence of 16k, 1.34 and 1.15 for 4 of 4k.
ORDERED_GROUP_HEADS_8 = 8
# Under a window a tile follows the one before it by as many blocks as it has keys; where that is
# one of 128 queries, more heads keep them apart. Queries in use have to fit L2, besides: measured
# at 128 4 heads 1 % ahead of 8 under 512 keys once power sets the clocks, 1 % behind under 128,
# 2 and 6 level, 16 1 % behind; at 64 8, 16 and 64 heads 6, 2 and 4 % behind 32.
WINDOW_GROUP_HEADS, WINDOW_GROUP_BYTES = {64: 4, 128: 32}, 8 << 20

# Queries a block and its buffers, of the dK and dV kernel.
DKV_BLOCKS = ((64, 4), (64, 3), (48, 3), (64, 2), (32, 3), (32, 2))

STAGED_COLUMNS = 32  # floats of dQ a row that leave room for a box of its 16-bit columns


@dataclass(frozen=True)
class Draft:
    """A main kernel's plan before its shared memory is laid out: regions by their names, `sizes` on
    multiples of 1024 bytes and `small` ones; other fields as in `BackwardPlan`."""

    family: str
    tile: Tile
    sizes: dict[str, int]
    small: dict[str, int]
    q_stages: int
    do_stages: int
    row_block: int
    ds_stages: int = 0
    dq_split: DqSplit = "none"
    dq_columns: int = 0
    dk_columns: int = 0
    dv_columns: int = 0
    registers: tuple[int, int] | None = None
    deterministic: bool = False
    completes: bool = False
    makes_d: bool = False
    job_bytes: int = JOB_BYTES
    consumers: int = CONSUMERS
    kept_rows: int = 0


VISIT_BYTES = 8  # a stage of queries: which block comes behind it


def make_fused(problem: Problem, target: Target, family: str = MAIN) -> BackwardPlan:
    """128 keys and, up to head dim 64, 128 queries, else 64: as many as registers hold. 80 queries
    at 128, as others have, measured 4 % behind."""
    rows = max(problem.head_dim_qk, problem.head_dim_v) <= 64
    tile = Tile(128 if rows else 64, ROWS_PER_CONSUMER * CONSUMERS)
    d, d_v = _whole_steps(problem.head_dim_qk), _whole_steps(problem.head_dim_v)
    # Small accumulators of unlike sizes spill: equal ones, clipped by the copy engine, do not.
    dk_columns, dv_columns = (64, 64) if rows and d != d_v else (d, d_v)
    # Beside scores, and a window's ends, consumers have no registers for it.
    tells = problem.listed and not (problem.gather or problem.scores or "window" in problem.masks)
    of_bits = problem.attn_mask and not tells
    crowded = problem.dropout or of_bits or problem.bias or problem.gather
    crowded = crowded or problem.wide_gradients  # which leave from registers
    # Under a window, where tiles have few blocks, a kernel that converts dQ takes an eighth of the
    # time. Without an order anyway, wide windows would lose up to a tenth by one.
    completes = problem.deterministic and "window" in problem.masks and not crowded
    dq_columns = (max(d, STAGED_COLUMNS) if completes else d) if rows else 64
    sizes = {
        **_operand_bytes(problem, tile, 2, 2),
        "Ds": 2 * tile.m * CONSUMERS * 128,
        "Dq": CONSUMERS * ROWS_PER_CONSUMER * dq_columns * 4,
        **({"Bias": CONSUMERS * score_tile_bytes(tile.m, 64)} if problem.bias else {}),
        **({"Lines": line_bytes(lines, tile.m)} if (lines := fused_lines(problem)) else {}),
    }
    # With a place of its own for dV the next tile's values come while this one's end is worked on.
    if not crowded and sum(sizes.values()) + sizes["V"] <= target.cta_smem_bytes - SMALL_BYTES:
        sizes["Dv"] = sizes["V"]
    if family == WITH_BIAS:
        sizes["Blank"] = tile.m * 128  # zeros for what no tile visits
    makes_d = _makes_d(problem, tile, completes)
    barriers = 24 + 2 * problem.bias + 2 * completes + 7 * makes_d
    small = {"Lse": 2 * tile.m * 4, "D": 2 * tile.m * 4, "Barriers": barriers * BARRIER_BYTES}
    if tells:
        small["Visits"] = 2 * VISIT_BYTES
    draft = Draft(
        family=family,
        tile=tile,
        sizes=sizes,
        small=small,
        q_stages=2,
        do_stages=2,
        ds_stages=2,
        row_block=tile.m,
        dq_split="rows" if rows else "columns",
        dq_columns=dq_columns,
        dk_columns=dk_columns,
        dv_columns=dv_columns,
        registers=SMALL_REGISTERS if max(dk_columns, dv_columns) <= 32 else None,
        deterministic=problem.deterministic,
        completes=completes,
        makes_d=makes_d,
    )
    return finish(problem, draft, target)


def fused_lines(problem: Problem) -> tuple[int, ...]:
    """How many lines of queries and of distances the kernel of all gradients keeps of what scores
    read; none beside a bias, which lies where S^T starts, nor where tiles may complete dQ, which
    take the room."""
    crowded = problem.bias or problem.deterministic and "window" in problem.masks
    found = () if crowded else turned_lines_in(problem.fragment_digests)
    return found if any(found) else ()


def line_bytes(lines: tuple[int, ...], columns: int) -> int:
    """Bytes of such lines of a block, which each warp lays down for itself."""
    of_queries, of_distances = lines
    return 4 * 4 * CONSUMERS * (columns * of_queries + (columns + 16) * of_distances)


def feasible_dkv(problem: Problem, target: Target) -> Iterator[BackwardPlan]:
    """dK and dV of 64 keys, a warpgroup each. Measured at 256: 48 queries in three stages 10 %
    ahead of 64 in two; at 192/128, three stages 1.9 x two, four 8 % ahead of three."""
    most = least(DKV_QUERIES, features_of(problem))
    pairs = is_wide(problem)
    wide_blocks = AHEAD_BLOCKS if sends_ahead(problem) else BLOCKS
    for m, stages in wide_blocks if pairs else DKV_BLOCKS:
        tile = Tile(m, ROWS_PER_CONSUMER)
        sizes = {
            **_operand_bytes(problem, tile, stages, stages),
            "Weights": 2 * tile.m * tile.n * 2,
            **({"Bias": 4 * score_tile_bytes(m, 16)} if problem.bias else {}),
            **_sums_bytes(problem, m, ROWS_PER_CONSUMER, 1),
        }
        rows = stages * m * 4
        barriers = 10 + 4 * stages + (2 + 2 * CONSUMERS) * pairs
        small = {"Lse": rows, "D": rows, "Barriers": barriers * BARRIER_BYTES}
        kept = KEPT_ROWS * keeps_ds(problem)
        draft = Draft(OF_KEYS, tile, sizes, small, stages, stages, row_block=m, kept_rows=kept)
        made = finish(problem, draft, target)
        if made.smem_bytes <= target.cta_smem_bytes and m <= most:
            yield made


def feasible_dq(problem: Problem, row_block: int, target: Target) -> Iterator[BackwardPlan]:
    """dQ of 128 queries. A third stage of keys is worth 30 % of the block (measured at 192/128:
    80 keys in two stages are 27 % behind 64 in three; at 256, 48 in three 22 % behind
    64 in two)."""
    features = features_of(problem)
    limit = least(DQ_OPERANDS, features)
    columns, columns_v = cta_columns(problem)
    ahead = sends_ahead(problem, queries=True)
    choices = [
        (n * (1.3 if k > 2 else 1.0) * (1.05 if v > 1 else 1.0), n, k, v)
        for n in range(least(DQ_KEYS, features), 16, -16)
        for k in (3, 2)
        for v in (2, 1)
        if columns // 2 + n + n // 4 <= limit
        and (not ahead or (k > 2 and columns // 2 + 2 * n + n // 4 <= AHEAD_OPERANDS))
    ]
    for _, n, k_stages, v_stages in sorted(choices, reverse=True):
        tile = Tile(ROWS_PER_CONSUMER * CONSUMERS, n)
        qk, v = 128 * boxes_of(columns), 128 * boxes_of(columns_v)
        sizes = {"Q": tile.m * qk, "Do": tile.m * v, "K": k_stages * n * qk, "V": v_stages * n * v}
        sizes |= {"Bias": 4 * CONSUMERS * score_tile_bytes(16, n)} if problem.bias else {}
        sizes |= _sums_bytes(problem, ROWS_PER_CONSUMER, n, 2)
        barriers = 4 + 2 * (k_stages + v_stages) + (2 + 4 * CONSUMERS) * is_wide(problem)
        small = {"Barriers": barriers * BARRIER_BYTES}
        draft = Draft(OF_QUERIES, tile, sizes, small, k_stages, v_stages, row_block)
        made = finish(problem, draft, target)
        if made.smem_bytes <= target.cta_smem_bytes:
            yield made


def _whole_steps(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def _operand_bytes(problem: Problem, tile: Tile, q_stages: int, do_stages: int) -> dict[str, int]:
    qk, v = (128 * boxes_of(columns) for columns in cta_columns(problem))
    return {
        "Q": q_stages * tile.m * qk,
        "Do": do_stages * tile.m * v,
        "K": tile.n * qk,
        "V": tile.n * v,
    }


def _sums_bytes(problem: Problem, rows: int, columns: int, kinds: int) -> dict[str, int]:
    """Bytes of what the other CTA of a pair sends: so many kinds of sums of a consumer's block, in
    float32."""
    return {"Sums": kinds * CONSUMERS * rows * columns * 4} if is_wide(problem) else {}


def _splits_heads(problem: Problem, tile: Tile) -> bool:
    """Whether there is a place for sums of dK and dV, and there are registers to find it."""
    windowed = "window" in problem.masks
    if problem.gather or problem.bias or windowed and problem.deterministic:
        return False
    if problem.wide_gradients:
        return False
    if (problem.q_seq == "packed") != (problem.kv_seq == "packed"):
        return False
    beside_alibi = windowed or problem.varlen and (problem.attn_mask or len(problem.scores) > 1)
    spills = "alibi" in problem.scores and beside_alibi
    spills = spills or problem.dropout and (tile.m > 64 or problem.attn_mask)
    return not spills


def _held_steps(problem: Problem, draft: Draft) -> int:
    """The most that gain with blocks of 64 queries. Measured at 128, 112, 96 and 80: three 1.01 to
    1.05, more no better; no gain with dropout, a mask's bits, a bias, a softcap or in an order of
    additions without a window."""
    features = features_of(problem)
    if draft.family == OF_KEYS:
        return _held_steps_of_keys(problem, features)
    if draft.family not in (MAIN, WITH_BIAS, WITH_SUMS):
        return 0
    completes = draft.completes
    ordered = problem.deterministic and not completes
    if draft.tile.m > 64 or ordered or features & {"heavy", "dropout", "attn_mask", "gather"}:
        return 0
    if features >= {"unlike", "varlen"}:
        return 0  # no registers
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    few = largest > 112 and (problem.scores or completes and problem.varlen)  # registers
    return 2 if few else 3


def _held_steps_of_keys(problem: Problem, features: frozenset[str]) -> int:
    """Measured beside dS in memory: at 256 four 1.01 to 1.10, six no better, at 192/128 1.01 to
    1.04."""
    crowded = features & {"heavy", "several", "dropout", "attn_mask", "gather"}
    fewest = min(problem.head_dim_qk, problem.head_dim_v)
    return 0 if is_wide(problem) or crowded or fewest <= 64 else 4


def _makes_d(problem: Problem, tile: Tile, completes: bool) -> bool:
    """Measured 1.00 to 1.06 of whole calls, most where these are short, and 1.00 to 1.04 more since
    O comes by the copy engine."""
    return completes and tile.m == 64 and not problem.varlen


def _frees_early(problem: Problem, tile: Tile, completes: bool) -> bool:
    """Measured with 128 queries a block 1.01 to 1.04, 0.98 where tiles complete dQ; with 64 level,
    or behind beside held keys."""
    return tile.m > 64 and not (completes or problem.gather)


def _schedule(problem: Problem, draft: Draft) -> tuple[Schedule, bool]:
    """How tiles reach the CTAs, and whether the last block, or the first, is visited first."""
    full = FULL_SCHEDULE_8 if draft.family == MAIN_8 else FULL_SCHEDULE
    schedule = CAUSAL_SCHEDULE if problem.masks else full
    descending = draft.family == OF_QUERIES and schedule.longest_first
    if not draft.deterministic:
        return schedule, descending
    size, heads = ORDERED_GROUP_BYTES, ORDERED_GROUP_HEADS
    heads = ORDERED_GROUP_HEADS_8 if draft.family == MAIN_8 else heads
    schedule = replace(schedule, kv_group_bytes=size, group_heads=heads)
    if "window" not in problem.masks:
        return schedule, descending
    # The short tiles at a sequence's end first, since they end with it, too: those before
    # them in the other order had the same block to begin with, each waiting for another.
    size, heads = WINDOW_GROUP_BYTES, WINDOW_GROUP_HEADS[draft.tile.m]
    return replace(schedule, kv_group_bytes=size, group_heads=heads, tail_share=0), True


def _waves(problem: Problem, draft: Draft) -> bool:
    """Whether tiles are drawn in waves. Measured with 8 query heads a key head: 1.09 to 1.17 for 2
    sequences of 8k, 1.41 to 1.46 for one of 4k; with 4 heads 1.01 to 1.03 for 4 of 4k, 1.10 for
    one of 32k. At 256, where nothing is summed in memory, 1.01 to 1.02, but heads alone were behind
    in two of three runs."""
    waves = draft.family == MAIN and problem.masks == ("causal",)
    # Packed tiles in an order keep theirs: where many sequences stand among those of their length
    # is chance, and which way a tile goes decides bits.
    waves = waves and not (problem.bias or problem.varlen and draft.deterministic)
    return waves and not (problem.varlen and len(problem.scores) > 1)  # would spill


def finish(problem: Problem, draft: Draft, target: Target) -> BackwardPlan:
    """The plan with its shared memory laid out."""
    producer, consumer = draft.registers or REGISTERS[draft.family]
    if problem.gather:
        producer, consumer = GATHER_REGISTERS
    pairs = draft.family in (OF_KEYS, OF_QUERIES) and is_wide(problem)
    if pairs:
        producer, consumer = pair_registers(problem, draft.family)
    schedule, descending = _schedule(problem, draft)
    waves = _waves(problem, draft)
    tile, completes = draft.tile, draft.completes
    job = draft.job_bytes + JOB_BYTES_WAVES * waves + JOB_BYTES_TURNS * completes
    order = {"Order": order_bytes(0)} if problem.varlen else {}
    drawn = {"Drawn": DRAWN_BYTES} if pairs else {}
    regions = lay_out(draft.sizes, {**draft.small, "Job": job, **drawn, **order})
    fused, alone = draft.family in (MAIN, WITH_BIAS, WITH_SUMS), draft.family == MAIN
    return BackwardPlan(
        arch=target.name,
        family=draft.family,
        tile=tile,
        consumers=draft.consumers,
        q_stages=draft.q_stages,
        do_stages=draft.do_stages,
        ds_stages=draft.ds_stages,
        producer_registers=producer,
        consumer_registers=consumer,
        dq_split=draft.dq_split,
        dq_columns=draft.dq_columns,
        dk_columns=draft.dk_columns,
        dv_columns=draft.dv_columns,
        row_block=draft.row_block,
        deterministic=draft.deterministic,
        completes=completes,
        pairs=pairs,
        sends_ahead=pairs and sends_ahead(problem, queries=draft.family == OF_QUERIES),
        descending=descending,
        waves=waves,
        short_head=SHORT_HEAD if waves and not (draft.deterministic or problem.varlen) else 0,
        splits_heads=alone and _splits_heads(problem, tile),
        held_steps=_held_steps(problem, draft),
        frees_early=fused and _frees_early(problem, tile, completes),
        makes_d=draft.makes_d,
        starts_early=draft.family not in (OF_QUERIES, OF_KEPT) and not problem.gather,
        kept_rows=draft.kept_rows,
        schedule=schedule,
        smem=regions,
        smem_bytes=regions[-1].offset + regions[-1].bytes,
        threads=128 * (draft.consumers + 1),
    )
