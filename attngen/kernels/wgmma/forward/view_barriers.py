"""View, barriers: all mbarriers between those who load operands and those who use them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....spec.problem import Problem
from .plan import Plan
from .traits import clears_tail, converts, one_loader, parts_of
from .view_constants import Constant
from .view_loads import q_by_warp


@dataclass(frozen=True)
class Barrier:
    """An mbarrier of each stage of a ring, and C++ for how many arrive at it."""

    name: str
    arrivals: str


@dataclass(frozen=True)
class Ring:
    """Barriers of a ring of buffers. stages: C++."""

    stages: str
    barriers: tuple[Barrier, ...]


@dataclass(frozen=True)
class Barriers:
    """All mbarriers of a kernel.

    places: in shared memory. operands: of Q, K and V as products read them; others: of what scores
    read, of weights that are handed over, and of what is transposed or widened. job_readers: C++,
    threads beside consumers that read a job. clears_tail: whether one awaits what clears the last
    block of V.
    """

    places: tuple[Constant, ...]
    operands: tuple[Ring, ...]
    others: tuple[Ring, ...]
    job_readers: str
    clears_tail: bool


def barriers_of(problem: Problem, plan: Plan, reads_tile: bool) -> Barriers:
    """Every mbarrier of a kernel. reads_tile: whether scores read a tensor."""
    operands = tuple(_operand_rings(problem, plan))
    others = tuple(_other_rings(problem, plan, reads_tile))
    tail = clears_tail(problem)
    return Barriers(
        places=tuple(_places(operands, others, tail)),
        operands=operands,
        others=others,
        job_readers=" + ".join(map(str, _job_readers(problem, plan, reads_tile))),
        clears_tail=tail,
    )


def _operand_rings(problem: Problem, plan: Plan) -> Iterator[Ring]:
    """Barriers of Q, K and V: at a full one who loads, or converts, arrives, at an empty one a lane
    of each consumer warp."""
    copies = "32" if problem.gather else "1"
    k_full = "4" if problem.widens else copies
    v_full = "3" if one_loader(problem, plan) else "4" if converts(problem) else copies
    yield _ring("Q", "kConsumers", copies, "kOutputOverQ ? 1 : 4")
    if plan.pairs:  # a lane of each warp of the same warpgroup in both CTAs
        yield _ring("K", f"kKStages * {parts_of(problem.head_dim_qk, plan)}", "1", "8")
        yield _ring("V", "kVStages * 2", "1", "8")
        return
    yield _ring("K", "kKStages", k_full, "kConsumers * 4")
    yield _ring("V", "kVStages", v_full, "8" if plan.shares_output else "kConsumers * 4")


def _other_rings(problem: Problem, plan: Plan, reads_tile: bool) -> Iterator[Ring]:
    """Barriers of weights that a warpgroup hands to another, of the tile that one CTA draws for
    both of a pair, of tiles that scores read, and of keys and values as they are loaded."""
    if plan.shares_output:
        yield _ring("Weights", "2", "128", "128")
    if plan.pairs:
        yield _ring("Drawn", "1", "1", "1")
    if reads_tile:
        yield _ring("Tile", "kConsumers", "32", "128")
    if problem.eight_bit:
        yield _ring("Raw", "kRawStages", "1", "3" if one_loader(problem, plan) else "4")
    elif problem.widens:
        rings = [_ring(name, "kRawStages", "1", "4") for name in ("RawK", "RawV")]
        yield Ring("kRawStages", tuple(barrier for ring in rings for barrier in ring.barriers))


def _ring(name: str, stages: str, full: str, empty: str) -> Ring:
    return Ring(stages, (Barrier(f"{name}Full", full), Barrier(f"{name}Empty", empty)))


def _places(operands: tuple[Ring, ...], others: tuple[Ring, ...], tail: bool) -> Iterator[Constant]:
    """The address of each barrier, one ring after another."""
    job = Ring("", (Barrier("JobFull", ""), Barrier("JobEmpty", "")))
    tails = (Ring("", (Barrier("VTail", ""),)),) if tail else ()
    place = "kSmemBarriers"
    for ring in (*operands, job, *tails, *others):
        for barrier in ring.barriers:
            yield Constant("u32", f"k{barrier.name}", place)
            place = f"k{barrier.name} + 8" + (f" * {ring.stages}" if ring.stages else "")


def _job_readers(problem: Problem, plan: Plan, reads_tile: bool) -> Iterator[int]:
    """Threads that read a job: loaders, the other lanes of a warp that loads queries, and those
    that transpose or widen."""
    alone = one_loader(problem, plan)
    yield 96 if problem.gather else 65 if problem.paged else 1 if alone else 3
    if q_by_warp(problem, plan, reads_tile) and not problem.gather:
        yield 31
    if converts(problem) or plan.shares_output:
        yield 96 if alone else 128
