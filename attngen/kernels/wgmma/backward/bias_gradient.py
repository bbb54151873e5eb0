"""Plans of the kernels that make the gradient of a bias, and of what a score learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....fragments.lowering import learns_at_keys, learns_at_queries, reaches_of
from ....fragments.names import DIAGONAL
from ....fragments.program import Program, learns
from ....fragments.program_text import programs_in
from ....fragments.score_lines import lines_in
from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import Tile, lay_out, score_tile_bytes
from ..shared import BARRIER_BYTES, LIGHT_SCORES, boxes_of
from .feasible import CONSUMERS
from .plan import OF_BIAS, OF_LEARNED, ROWS_PER_CONSUMER, BiasGradientPlan, LearnedPlan
from .registers import BIAS_LENGTH_REGISTERS, REGISTERS, fuses
from .wide import is_wide

TERM_BYTES, PROGRESS_BYTES = 24, 8  # structs of the kernel of a bias's gradient
Fields = dict[str, Any] | None
LEARNED_KEYS = 64  # a tile: threads have its products as well as its weights and their gradients


def bias_plans(problem: Problem, row_block: int, target: Target) -> Iterator[BiasGradientPlan]:
    """The plan of the kernel of the bias's gradient, where there is a bias: the largest tile of 128
    rows, of wide heads of 64, that fits, then as many buffers as do."""
    if not problem.bias:
        return
    # Random words, a mask's bits and further scores take the room of some keys.
    crowded = problem.dropout or problem.attn_mask or len(problem.scores) > 1
    # So does the loader where lengths vary, that copies rows itself, or beside these of wide heads.
    loads_more = problem.varlen or problem.gather or bool(crowded) and is_wide(problem)
    most = ((128, 112), (96, 80))[bool(crowded)][loads_more]
    sizes = [n for n in (128, 112, 96, 80, 64, 32) if n == most or n < most and n % 32 == 0]
    choices = [(n, stages) for n in sizes for stages in (4, 3, 2)]
    made = (_make_plan(problem, row_block, target, *choice) for choice in choices)
    fields = next(filter(None, made))
    yield BiasGradientPlan(family=OF_BIAS, **fields)


def learned_plans(problem: Problem, row_block: int, target: Target) -> Iterator[LearnedPlan]:
    """The plan of the kernel of the gradients of what a score learns, where it does."""
    if not learns(problem.scores) or sums_keys(problem) or sums_queries(problem):
        return
    choices = [(n, stages) for n in (LEARNED_KEYS, 32) for stages in (6, 4, 3, 2)]
    made = (_make_learned(problem, row_block, target, *choice) for choice in choices)
    fields = next(filter(None, made))
    yield LearnedPlan(family=OF_LEARNED, **fields)


def sums_keys(problem: Problem) -> bool:
    """Whether the kernel of all gradients also makes those of what a score learns, which it has by
    sums of its keys."""
    program = _lone_program(problem)
    return program is not None and learns_at_keys(program)


def sums_queries(problem: Problem) -> bool:
    """Whether the kernel that rounds dQ also makes the gradients of what a score learns: it has
    them by dQ times Q. Products of dS keep numbers near 0 apart from it in bfloat16 alone."""
    program = _lone_program(problem)
    rounded = problem.dtype_q == "bf16" and not (problem.gather or problem.wide_gradients)
    completes = problem.deterministic and "window" in problem.masks
    apart = rounded and not completes
    return program is not None and apart and learns_at_queries(program)


def _lone_program(problem: Problem) -> Program | None:
    """The program that learns, where it sees products of queries and keys, and one kernel makes
    all gradients; else None."""
    programs = [each for each in programs_in(problem.fragment_digests) if each.learned]
    if len(programs) != 1 or problem.dropout or problem.bias or not fuses(problem):
        return None
    (program,) = programs
    return program if {*problem.scores} <= {program.name, *LIGHT_SCORES} else None


def sums_by_distance(problem: Problem) -> bool:
    """Whether a score learns what one of its loads reads by distances."""
    programs = programs_in(problem.fragment_digests)
    return any(DIAGONAL in reaches_of(each) for each in programs)


def distance_bytes(n: int) -> int:
    """Memory of a warpgroup that sums its rows of so many keys by distances: those of each warp,
    two in one; its parts of two blocks; and what is carried on from these."""
    part = 15 + n
    return 4 * (4 * 8 * (part | 1) + 2 * 4 * (part + 1) + 2 * ROWS_PER_CONSUMER)


def line_bytes(problem: Problem, n: int) -> int:
    """Memory of a warp's lines of so many keys."""
    columns, distances = lines_in(problem.fragment_digests, learns=True)
    return 4 * (n * columns + (n + 16) * distances)


def _make_plan(problem: Problem, row_block: int, target: Target, n: int, stages: int) -> Fields:
    """The plan of a bias's gradient, but for its kernel, of `n` keys a tile in so many stages of
    rows and keys; None where it does not fit."""
    tile = _tile(problem, n)
    sizes = {
        "Stages": stages * (tile.m + n) * 128 * _boxes(problem),
        "Bias": _bias_bytes(problem, tile),
    }
    return _fields(problem, row_block, target, tile, stages, sizes, 4)


def _make_learned(problem: Problem, row_block: int, target: Target, n: int, stages: int) -> Fields:
    """The plan of what a score learns, the same way: a block's rows stay, and stages have keys."""
    tile, boxes = _tile(problem, n), _boxes(problem)
    by_distance = sums_by_distance(problem)
    sizes = {
        "Rows": tile.m * 128 * (boxes_of(problem.head_dim_qk) + boxes_of(problem.head_dim_v)),
        "Stages": stages * n * 128 * boxes,
        "Bias": _bias_bytes(problem, tile),
        **({"Distances": _consumers(tile) * distance_bytes(n)} if by_distance else {}),
        "Lines": 4 * _consumers(tile) * line_bytes(problem, n),
    }
    return _fields(problem, row_block, target, tile, stages, sizes, 6)


def _tile(problem: Problem, n: int) -> Tile:
    consumers = 1 if is_wide(problem) else CONSUMERS  # two stages of 128 rows have no room
    return Tile(ROWS_PER_CONSUMER * consumers, n)


def _consumers(tile: Tile) -> int:
    return tile.m // ROWS_PER_CONSUMER


def _boxes(problem: Problem) -> int:
    """Boxes of a row of the wider operands."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    return boxes_of(largest, DTYPE_BYTES[problem.dtype_q])


def _bias_bytes(problem: Problem, tile: Tile) -> int:
    return 4 * _consumers(tile) * score_tile_bytes(16, tile.n) * problem.bias


def _fields(
    problem: Problem,
    row_block: int,
    target: Target,
    tile: Tile,
    stages: int,
    sizes: dict[str, int],
    more: int,
) -> Fields:
    """Fields of a plan of these regions of shared memory; None where they do not fit. more:
    barriers beside those of stages and of a bias's parts."""
    consumers = _consumers(tile)
    barriers = 2 * stages + 4 * consumers + more
    small = {"Barriers": barriers * BARRIER_BYTES, "Terms": stages * TERM_BYTES + PROGRESS_BYTES}
    regions = lay_out(sizes, small)
    smem_bytes = regions[-1].offset + regions[-1].bytes
    if smem_bytes > target.cta_smem_bytes:
        return None
    loads_more = problem.varlen or problem.gather or _boxes(problem) > 3
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
