"""View, loads: sequences, jobs, the scheduler, and loaders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....spec.problem import Problem
from ...uses import FragmentUse
from ...view import FragmentView, fragment_view
from .plan import Plan
from .traits import (
    clears_tail,
    converts,
    cuts_tiles,
    fills_gaps,
    first_row_of,
    one_loader,
    parts_of,
    starts_early,
)
from .view_constants import block_places

Uses = dict[str, list[FragmentUse]]


@dataclass(frozen=True)
class Side:
    """The sequences of queries, or of keys and values.

    fragment: finds a sequence. varies: whether lengths are told on the device; packed: whether one
    sequence follows the other; dense: neither. index_type, index: C++, where a tensor map has the
    sequence of a job. length_of_tile: C++, the length of a tile's sequence, where packed ones are
    found with their places. map_type: C++, of tensor maps.
    """

    name: str
    fragment: FragmentView
    varies: bool
    packed: bool
    dense: bool
    index_type: str
    index: str
    length_of_tile: str
    map_type: str


@dataclass(frozen=True)
class Scheduler:
    """How tiles are drawn and handed out.

    tiles: C++, their number. first, stride: C++, of a CTA's tiles, or a pair's. dynamic: drawn from
    a counter, else in strides; pairs: by one of two CTAs for both. finds_places: whether a packed
    sequence's place is found with its length.
    skips_far_keys: whether a line leaves faint weights of far keys, whose blocks are left out.
    stops_at_bits: whether a window may begin behind the last block of which an arbitrary mask has
    bits. row_block, block_begin, block_end: C++, what a job gets; end_block: C++, the block of 64
    rows at which a tile ends, where a job says this, else empty. first_row, end_row: C++, the
    tile's rows.
    """

    tiles: str
    first: str
    stride: str
    dynamic: bool
    pairs: bool
    finds_places: bool
    skips_far_keys: bool
    stops_at_bits: bool
    row_block: str
    block_begin: str
    block_end: str
    end_block: str
    first_row: str
    end_row: str


@dataclass(frozen=True)
class QLoader:
    """The loader of queries.

    by_warp: a whole warp loads, which also copies rows, fills those of no sequence, or brings what
    scores read. place, batch: C++, the sequence in the tensor map, and the batch. first_row: C++.
    """

    by_warp: bool
    place: str
    batch: str
    first_row: str


@dataclass(frozen=True)
class LoadedRing:
    """The buffers into which loaders bring keys, or values.

    name: of the ring, which completes the names of its region and barriers. boxes, rows, stages,
    box_columns: C++, of a buffer. box_bytes, group_bytes: C++, how far boxes and groups of 8 rows
    lie apart. barrier_bytes: of a buffer's barriers, of which one that comes in_parts has
    two. tail: C++, the barrier at which a tail is cleared, or 0. valid_rows: C++, rows of a block
    that widening keeps.
    """

    name: str
    boxes: str
    rows: str
    stages: str
    box_columns: str
    box_bytes: str
    group_bytes: str
    barrier_bytes: int
    in_parts: bool
    tail: str
    valid_rows: str


@dataclass(frozen=True)
class Role:
    """Threads of the producer warpgroup, and what they run.

    threads: C++, which. struct: C++. fetch: the fragment that it begins with, if any. arguments:
    C++, what follows.
    """

    threads: str
    struct: str
    arguments: str
    fetch: FragmentView | None = None


@dataclass(frozen=True)
class Loads:
    """Warps and threads that load operands.

    mapped: tensors whose maps are fetched ahead. queries: their loader; keys, values: where loaders
    bring these. by_one_thread: one thread loads everything; pairs: two CTAs load keys and values
    for each other; producers: roles of the producer warpgroup, but for one thread.
    """

    mapped: tuple[str, ...]
    queries: QLoader
    keys: LoadedRing
    values: LoadedRing
    by_one_thread: bool
    pairs: bool
    producers: tuple[Role, ...]


def side_of(name: str, problem: Problem, use: FragmentUse) -> Side:
    """The sequences of `q`, or of `kv`."""
    kind = problem.q_seq if name == "q" else problem.kv_seq
    packed, dense = kind == "packed", kind == "dense"
    place = f"{name}_token" if packed else "batch"
    return Side(
        name=name,
        fragment=fragment_view(use),
        varies=not dense,
        packed=packed,
        dense=dense,
        index_type="int" if dense else "SequenceIndex",
        index="job.batch" if dense else f"{{job.{name}_length, job.{place}}}",
        length_of_tile=f"forget({name}_place.length)"
        if packed
        else f"{name}_sequence(p).length(tile.batch)",
        map_type="TensorMap" if dense else "SequenceMap",
    )


def job_fields(problem: Problem, plan: Plan) -> Iterator[str]:
    """Members of a job, an int each, beside those of all kernels."""
    if cuts_tiles(problem, plan):
        yield from ("first_row", "large_tiles")
    for name, kind in (("q", problem.q_seq), ("kv", problem.kv_seq)):
        if kind != "dense":
            yield f"{name}_length"
        if kind == "packed":
            yield f"{name}_token"
    if fills_gaps(problem, plan):
        yield from ("share", "shares")


def scheduler_of(
    problem: Problem, plan: Plan, *, skips_far_keys: bool, bounds_left: bool
) -> Scheduler:
    """How a plan's tiles are drawn. bounds_left: whether a mask hides keys before some."""
    cuts = cuts_tiles(problem, plan)
    stops = problem.attn_mask and bounds_left
    end_block, first_row, end_row = _rows_of_tile(problem, plan)
    return Scheduler(
        tiles="tiles" if problem.varlen else "tiles().count()" if cuts else "p.tiles",
        first="blockIdx.x / 2" if plan.pairs else "blockIdx.x",
        stride="gridDim.x / 2" if plan.pairs else "gridDim.x",
        dynamic=plan.schedule.dynamic,
        pairs=plan.pairs,
        finds_places="packed" in (problem.q_seq, problem.kv_seq),
        skips_far_keys=skips_far_keys,
        stops_at_bits=stops,
        row_block="row_block" if one_loader(problem, plan) else "tile.row_block",
        block_begin="begin" if skips_far_keys or stops else "blocks.begin",
        block_end="min_of(blocks.end, last_block + 1)" if stops else "blocks.end",
        end_block=end_block,
        first_row=first_row,
        end_row=end_row,
    )


def _rows_of_tile(problem: Problem, plan: Plan) -> tuple[str, str, str]:
    """C++: the block of 64 rows at which a tile ends, if a job says this, its first row, and its
    end."""
    if cuts_tiles(problem, plan):
        return "cut.end", "cut.begin * 64", "cut.end * 64"
    if one_loader(problem, plan):
        end = "end_of_tile<kConsumers>(tile.row_block, p.tiles_m, ceil_div(ctx.q_len, 64))"
        return end, "max_of(first_row_of(row_block), 0)", "row_block * 64"
    return "", "tile.row_block * kTileM", "first + kTileM"


def loads_of(problem: Problem, plan: Plan, uses: Uses, reads_tile: bool) -> Loads:
    """Warps and threads that load operands. reads_tile: whether scores read a tensor."""
    return Loads(
        mapped=mapped_tensors(problem, plan),
        queries=q_loader_of(problem, plan, reads_tile),
        keys=k_ring_of(problem, plan),
        values=v_ring_of(problem, plan),
        by_one_thread=one_loader(problem, plan),
        pairs=plan.pairs,
        producers=tuple(producers_of(problem, plan, uses, reads_tile)),
    )


def q_loader_of(problem: Problem, plan: Plan, reads_tile: bool) -> QLoader:
    """The loader of queries. reads_tile: whether scores read a tensor."""
    return QLoader(
        by_warp=q_by_warp(problem, plan, reads_tile),
        place="batch" if problem.gather else "index",
        batch="batch" if problem.gather else "slot->batch",
        first_row=first_row_of(problem, plan, "row_block"),
    )


def q_by_warp(problem: Problem, plan: Plan, reads_tile: bool) -> bool:
    """Whether a whole warp loads queries."""
    return fills_gaps(problem, plan) or problem.gather or reads_tile


def k_ring_of(problem: Problem, plan: Plan) -> LoadedRing:
    """Where loaders bring keys."""
    widens = problem.widens
    places = block_places(problem, "K", "kRawKeys * 128" if widens else "kKeyBoxBytes")
    return LoadedRing(
        name="RawK" if widens else "K",
        boxes="kRawKBoxes" if widens else "kQkBoxes",
        rows="kRawKeys" if widens else "kTileN",
        stages="kRawStages" if widens else "kKStages",
        box_columns="kRawColumns" if widens else "kBoxColumns",
        box_bytes=places.box_bytes,
        group_bytes=places.group_bytes,
        barrier_bytes=8 * parts_of(problem.head_dim_qk, plan),
        in_parts=parts_of(problem.head_dim_qk, plan) > 1,
        tail="0",
        valid_rows="kTileN",
    )


def v_ring_of(problem: Problem, plan: Plan) -> LoadedRing:
    """Where loaders bring values."""
    widens, raw = problem.widens, converts(problem)
    places = block_places(problem, "V", "kRawKeys * 128" if raw else "kKeyBoxBytes")
    return LoadedRing(
        name="RawV" if widens else "Raw" if raw else "V",
        boxes="kRawVBoxes" if widens else "kVBoxes",
        rows="kRawKeys" if raw else "kTileN",
        stages="kRawStages" if raw else "kVStages",
        box_columns="kRawColumns" if widens else "kBoxColumns",
        box_bytes=places.box_bytes,
        group_bytes=places.group_bytes,
        barrier_bytes=8 * parts_of(problem.head_dim_v, plan),
        in_parts=parts_of(problem.head_dim_v, plan) > 1,
        tail="kVTail" if clears_tail(problem) else "0",
        valid_rows="kv_len - block * kTileN" if problem.paged else "kTileN",
    )


def producers_of(problem: Problem, plan: Plan, uses: Uses, reads_tile: bool) -> Iterator[Role]:
    """Roles of the producer warpgroup, but where one thread loads everything."""
    if one_loader(problem, plan):
        return
    order = ", find_order(p, shared)" if plan.orders_few else ", find_order(p)"
    yield Role("threadIdx.x == 0", "Scheduler", "smem, slot" + order * problem.varlen)
    if q_by_warp(problem, plan, reads_tile):
        yield Role("warp == 1", "QLoader", "smem, slot, lane")
    else:
        yield Role("threadIdx.x == 32", "QLoader", "smem, slot")
    if problem.gather:
        yield Role("warp == 2", "KLoader", "smem, slot, lane")
        yield Role("warp == 3", "VLoader", "smem, slot, lane")
    elif problem.paged:
        k_fetch, v_fetch = (fragment_view(uses[role][0]) for role in ("kv_fetch", "v_fetch"))
        yield Role("warp == 2", "KLoader", "&p.map_k, smem, lane", k_fetch)
        yield Role("warp == 3", "VLoader", "&p.map_v, smem, lane", v_fetch)
    else:
        yield Role("threadIdx.x == 64", "KLoader", "&p.map_k, smem, slot")
        yield Role("threadIdx.x == 96", "VLoader", "&p.map_v, smem, slot")


def converter_of(problem: Problem, plan: Plan) -> str:
    """C++: the struct that a warpgroup of its own runs between loaders and consumers, or empty."""
    if problem.widens:
        return "Widener"
    return "VTransposer" if problem.eight_bit and not one_loader(problem, plan) else ""


def mapped_tensors(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Tensors whose maps are fetched ahead."""
    if problem.gather:
        return ()
    return ("q", "k", "v") if plan.stores_rows else ("q", "k", "v", "o")


def waits_at_first_tile(problem: Problem, plan: Plan) -> bool:
    """Whether the kernel in front may still run until the first tile is handed out."""
    return starts_early(problem, plan) and not problem.varlen
