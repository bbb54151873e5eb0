"""Plans of a decode by products of warps: reading keys is all that counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from ...base import KernelPlan, SmemRegion, Tile, TiledPlan, lay_out
from ...support.combine import combine_plan
from ..atoms import ATOMS

DECODE = "mma_decode"
ROWS = 16
BOX_BYTES = 128  # of a row, which the swizzle spans
SUMS_BYTES = 128  # of a warp: a maximum and a sum of each of its rows
WEIGHTS_BYTES = ROWS * BOX_BYTES  # of a block of up to 64 keys, where warps divide columns
OWN_COLUMNS = 256  # of the output, up to which a warp holds all
LARGEST = 255  # registers of a thread
STEPS_KEPT = 8  # of 16 columns, up to which queries stay in registers
OTHER_REGISTERS = 72  # addresses, pages, scores, weights
# CTAs an SM, warps of each, keys of a warp, stages, in the order of preference: of more keys a warp
# finds maxima less often, of more stages more is on the way. Four small CTAs on an H200 read 256
# sequences of 1024 keys at 0.98 of the speed of the decode for Hopper, two at 0.92.
CHOICES = (
    (4, 4, 16, 3),
    *((2, 4, 32, 3), (2, 4, 16, 4), (2, 4, 16, 3), (1, 4, 32, 3), (1, 4, 16, 4), (1, 4, 16, 3)),
    *((2, 4, 16, 2), (1, 4, 16, 2), (1, 2, 16, 3), (1, 2, 16, 2)),
)
# The same where warps divide columns of the output, and keys and values have one stage each; last,
# tiles of 16 rows, which share keys that are there once: measured on an H200, of latent attention,
# four tiles read 128 heads' keys 1.7 to 2.2 times as fast as one of four warps, two 1.5 to 1.7, and
# 16 heads' 1.11 and 1.20; eight warps of one tile 1.06 and 1.07 to 1.09.
CHOICES_DIVIDED = (
    *((2, 4, 16, 1), (1, 8, 32, 1, 4), (1, 8, 16, 1, 2)),
    *((1, 8, 8, 1), (1, 4, 16, 1), (1, 4, 8, 1)),
)
# Of these places as many as keep the memory busy where each CTA reads keys of its own, by the CTAs
# of an SM: three of four small ones read one sequence of 128k keys 2 to 6 % faster than all four.
BUSY_SHARES = {4: 0.735}
BUSY_SHARE = 0.9


@dataclass(frozen=True)
class DecodePlan(TiledPlan):
    """The kernel that reads the keys. `ctas`: on one SM; `busy_ctas`: those of them that keep the
    memory busy. `warps`: of a CTA, each with `warp_keys` of a block's keys; `stages`: buffers of
    these keys and their values."""

    arch: str
    family: str
    tile: Tile
    row_tiles: int
    warps: int
    warp_keys: int
    stages: int
    divides_columns: bool
    ctas: int
    busy_ctas: float
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int

    @property
    def row_warps(self) -> int:
        """Warps that have the same rows."""
        return self.warps // self.row_tiles

    @property
    def atoms(self) -> frozenset[str]:
        return ATOMS


def plans(problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
    """The plans of the kernel that reads the keys and of the one that joins; none where nothing
    fits."""
    found = next(feasible(problem, target), None)
    return (found, combine_plan(problem, target)) if found else ()


def feasible(problem: Problem, target: Target) -> Iterator[DecodePlan]:
    """Every plan that fits the target, the preferred first."""
    for choice in (*CHOICES, *CHOICES_DIVIDED):
        if plan := make_plan(problem, target, *choice):
            yield plan


def boxes_of(columns: int, element_bytes: int) -> int:
    """Boxes of a row."""
    return -(-columns * element_bytes // BOX_BYTES)


def operand_registers(problem: Problem, keys: int, sharing: int = 1) -> int:
    """Registers a thread holds at once: output, queries, and scores. sharing: warps that divide
    columns of the output."""
    steps = -(-problem.head_dim_qk // 16)
    kept = steps if steps <= STEPS_KEPT else 1
    return -(-problem.head_dim_v // (16 * sharing)) * 8 + 4 * kept + keys // 2


def make_plan(
    problem: Problem,
    target: Target,
    ctas: int,
    warps: int,
    keys: int,
    stages: int,
    row_tiles: int = 1,
) -> DecodePlan | None:
    """The plan of these choices; None where shared memory or registers do not hold it."""
    row_warps = warps // row_tiles
    rows, size = row_warps * stages * keys, DTYPE_BYTES[problem.dtype_kv]
    k_bytes, v_bytes = (
        rows * BOX_BYTES * boxes_of(columns, size)
        for columns in (problem.head_dim_qk, problem.head_dim_v)
    )
    divides = stages == 1
    if divides and problem.widens and keys % ROWS:
        return None  # bytes of 16 keys are turned at once
    if not divides and problem.head_dim_v > OWN_COLUMNS:
        return None
    if not divides:  # in the end the warps' outputs take these places
        v_bytes = max(v_bytes, 4 * warps * ROWS * problem.head_dim_v - k_bytes)
    q_bytes = row_tiles * ROWS * BOX_BYTES * boxes_of(problem.head_dim_qk, 2)
    weights = {"Weights": row_tiles * WEIGHTS_BYTES} if divides else {}
    smem = lay_out(
        {"Q": q_bytes, "K": k_bytes, "V": v_bytes, **weights}, {"Sums": warps * SUMS_BYTES}
    )
    smem_bytes = smem[-1].offset + smem[-1].bytes
    threads = warps * 32
    registers = operand_registers(problem, keys, row_warps if divides else 1)
    limit = min(LARGEST, target.sm_registers // (threads * ctas)) - OTHER_REGISTERS
    if smem_bytes > target.smem_share(ctas) or registers > limit:
        return None
    return DecodePlan(
        arch=target.name,
        family=DECODE,
        tile=Tile(row_tiles * ROWS, row_warps * keys),
        row_tiles=row_tiles,
        warps=warps,
        warp_keys=keys,
        stages=stages,
        divides_columns=divides,
        ctas=ctas,
        busy_ctas=BUSY_SHARES.get(ctas, BUSY_SHARE) * ctas,
        smem=smem,
        smem_bytes=smem_bytes,
        threads=threads,
    )
