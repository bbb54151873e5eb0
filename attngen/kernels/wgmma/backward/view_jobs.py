"""View parts, backward: tiles that a main kernel draws, and the blocks that they visit."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import Problem
from ...base import Axis
from ...view import TensorView, tensor_view
from ...view_axis import AxisView, axis_view
from .plan import OF_KEPT, OF_KEYS, OF_QUERIES, BackwardPlan


@dataclass(frozen=True)
class JobMember:
    """A member of struct Job beside those that every kernel has. Strings are C++.

    found: its value where the scheduler works a job out; read: where others take it from the slot.
    meaning: a comment.
    """

    type: str
    name: str
    meaning: str
    found: str
    read: str


HALF = JobMember(
    *("int", "half", "which half of the gradients' columns", "index % 2", "slot->half")
)


@dataclass(frozen=True)
class JobsView:
    """How tiles are drawn, and what is known of each. Strings are C++.

    tiles, heads: parameters that count the tiles of a head, and heads. place: which tile is drawn
    by number `index`; total: how many are, where lengths vary. tile_rows: positions a tile.
    query_head: the first query head of a tile. length: the sequence's, of the tile's axis.
    find_blocks: the function that finds the blocks that a tile visits. packed: whether some
    sequences are packed, so that lengths are found one by one.

    waves: whether tiles may come in waves that keep to the same block of queries, which of equal
    lengths the grid's size tells (waves_of_grid), of other lengths the order of sequences
    (waves_of_sequences). short_head: heads of fewer tiles come in waves, too. alone_ascends:
    whether tiles that come in no wave begin with their first block. order_arguments: template
    arguments of the order of tiles that come in none: whether the last come first, and which are
    kept for the end where lengths vary.

    in_rounds: whether a launch may have some of the heads.

    pairs: whether two CTAs share a tile, of which the first draws for both. first: C++, the first
    tile of a CTA, or of a pair; stride: how many of these there are; share: of rows of no sequence,
    and how many shares there are; beside_tiles: a further argument of `draw`.

    ordered: whether tiles wait for those drawn before them. fills: whether the scheduler's warp
    fills rows that belong to no sequence. count: the number of tiles. members: of struct Job.
    axis: the tiles' order where lengths vary, else None.

    loader: what loads the operands that a tile keeps. idle_warp: the warp that fills rows where the
    scheduler's does not; 0 where there is none to do so.
    """

    tiles: str
    heads: str
    place: str
    total: str
    tile_rows: str
    query_head: str
    length: str
    find_blocks: str
    packed: bool
    waves: bool
    waves_of_grid: bool
    waves_of_sequences: bool
    short_head: int
    alone_ascends: str
    order_arguments: str
    in_rounds: bool
    pairs: bool
    first: str
    stride: str
    share: str
    beside_tiles: str
    ordered: bool
    fills: bool
    count: str
    members: tuple[JobMember, ...]
    axis: AxisView | None
    loader: str
    idle_warp: int


@dataclass(frozen=True)
class Gap:
    """Gradients whose rows of no sequence a kernel zeroes.

    sequence: C++, where they are found. optional: whether another kernel may make dQ, and tell by
    a null pointer. heads: C++, how many each tensor has.
    """

    sequence: str
    optional: bool
    tensors: tuple[TensorView, ...]
    heads: str


@dataclass(frozen=True)
class VisitsView:
    """In which order a tile of keys visits blocks of queries, for all query heads of its group.

    one_loop: whether it is one loop, else blocks are a loop in one over heads. first_block: C++,
    the first one of one loop. heads_inside: whether a block is visited for all heads before the
    next one is; blocks_inside: whether all blocks are for a head before those for the next one, by
    a function that one loop or a consumer needs. begins_anywhere: whether a job says with which
    end it begins.
    """

    one_loop: bool
    first_block: str
    heads_inside: bool
    blocks_inside: bool
    begins_anywhere: bool


def jobs_view(
    problem: Problem, plan: BackwardPlan, loader: str, idle_warp: int = 0, *, halves: bool = False
) -> JobsView:
    """The jobs of a main kernel. loader: C++, what loads the operands that a tile keeps where the
    copy engine brings them. idle_warp: a warp that has nothing else to do then. halves: whether a
    tile is drawn for each half of the gradients' columns."""
    of_queries = plan.family in (OF_QUERIES, OF_KEPT)
    descending = "true" if plan.descending else "false"
    fills = problem.varlen and (plan.fused or problem.gather)
    return JobsView(
        tiles="q_tiles" if of_queries else "kv_blocks",
        heads="heads_q" if of_queries else "heads_kv",
        place="index / 2" if halves else "index",
        total="add_tiles(order.tiles(), order.tiles())" if halves else "order.tiles()",
        tile_rows="kTileM" if of_queries else "kTileN",
        query_head="tile.head" if of_queries else "tile.head * p.group_size",
        length="q_len" if of_queries else "kv_len",
        find_blocks="kv_block_range<kTileN>" if of_queries else "q_block_range<kTileM>",
        packed="packed" in (problem.q_seq, problem.kv_seq),
        waves=plan.waves,
        waves_of_grid=plan.waves and not problem.varlen,
        waves_of_sequences=plan.waves and problem.varlen,
        short_head=plan.short_head,
        alone_ascends="false" if plan.deterministic else "true",
        order_arguments=f"{descending}, 0" if problem.varlen else descending,
        in_rounds=plan.kept_rows > 0,
        pairs=plan.pairs,
        first="blockIdx.x / 2" if plan.pairs else "blockIdx.x",
        stride="gridDim.x / 2" if plan.pairs else "gridDim.x",
        share="2 * index + cluster_rank(), 2 * shares" if plan.pairs else "index, shares",
        beside_tiles=", parity" if plan.pairs else "",
        ordered=plan.deterministic or plan.adds_bias,
        fills=fills,
        count="tiles" if problem.varlen else "p.tiles",
        members=(*_members(plan), *((HALF,) if halves else ())),
        axis=_axis(problem, plan) if problem.varlen else None,
        loader="[](const Job&) {}" if problem.gather else loader,
        idle_warp=idle_warp if problem.varlen and not fills else 0,
    )


def _members(plan: BackwardPlan) -> list[JobMember]:
    found = []
    if plan.waves:
        meaning = "whether the first block is visited first, else the last one"
        found.append(JobMember("int", "ascends", meaning, "found.ascends", "slot->ascends"))
    if plan.completes:
        turns = "block_turns<kTileM, kTileN>(mask_list(p), ctx, first, blocks)"
        read = "{slot->turns.summed_begin, slot->turns.last_begin}"
        meaning = "which blocks have sums of earlier tiles, and which no later tile visits"
        found.append(JobMember("BlockTurns", "turns", meaning, turns, read))
    return found


def _axis(problem: Problem, plan: BackwardPlan) -> AxisView:
    of_queries = plan.family in (OF_QUERIES, OF_KEPT)
    axis = Axis(
        rows=plan.tile.m if of_queries else plan.tile.n,
        group_heads=plan.schedule.group_heads,
        group_bytes=plan.schedule.kv_group_bytes,
        sums=plan.dq_floats > 0 and not of_queries,
        follows=plan.descending,
        tail_share=0,
    )
    return axis_view(problem, axis, of_queries=of_queries, orders_few=plan.orders_few)


def gaps_of(problem: Problem, plan: BackwardPlan) -> tuple[Gap, ...]:
    """The gradients of which the kernel fills rows of no sequence: those that it makes, and dQ,
    which another one may convert."""
    found = []
    if problem.q_seq != "dense" and plan.family != OF_KEYS:
        dq = (tensor_view(problem, "dq"),)
        found.append(Gap("q_sequence(p)", plan.fused, dq, "p.heads_q"))
    if problem.kv_seq != "dense" and plan.family not in (OF_QUERIES, OF_KEPT):
        heads = "p.heads_kv / p.key_group" if plan.splits_heads else "p.heads_kv"
        dkv = (tensor_view(problem, "dk"), tensor_view(problem, "dv"))
        found.append(Gap("kv_sequence(p)", False, dkv, heads))
    return tuple(found)


def visits_view(plan: BackwardPlan, *, looks_ahead: bool) -> VisitsView:
    """The order in which tiles of keys visit blocks. looks_ahead: whether consumers need to know
    which block comes next."""
    heads_inside = plan.waves or (plan.deterministic and not plan.descending)
    one_loop = plan.waves or plan.deterministic
    last_first = "job.block_end - 1" if heads_inside else "job.block_begin"
    return VisitsView(
        one_loop=one_loop,
        first_block="first_block(job)" if plan.waves else last_first,
        heads_inside=heads_inside,
        blocks_inside=(one_loop or looks_ahead) and not heads_inside,
        begins_anywhere=plan.waves,
    )
