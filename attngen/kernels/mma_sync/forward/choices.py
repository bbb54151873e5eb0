"""Choices of a forward's plan by products of warps: what is worth trying, and what fits.

Figures marked `measured` are from an H200, of kernels built for the target that its architecture
shares with all; on no other chip has one of these kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import DTYPE_BYTES, DType, Problem
from ....targets.target import Target
from ...base import Schedule, Tile, lay_out, score_tile_bytes
from .plan import FORWARD, Plan

ROW_TILE = 16  # query rows of a product
WARP_THREADS = 32
BOX_BYTES = 128  # of a row, which the swizzle spans
# Rescaling only where a maximum grows by 2^8: measured +3 and +16 % at 128, +14 and +9 % at 64,
# full and causal, over rescaling always.
LAZY_LOG2 = 8
LAZY_LOG2_FP8 = 2  # of e4m3's range, which ends at 448; weights begin at 2^6 then instead of 2^8
# Registers a thread has for output, scores and weights, by those that it has in all. From a sweep
# of what the compiler spills.
OPERANDS = {255: 204, 168: 120}
# Fewer, by stages, where rows are copied by address beside dropout, so that blocks are a size
# smaller: some spill 268 bytes at 128, and 248 at 64.
CROWDED = {1: 8, 2: 40}
MASKED_SCORES = 8  # fewer beside bits of a mask and a score: some have 34 local accesses a block
SCALE_BYTES = 12  # of a token of keys and values, which each warp lays down for itself
LARGEST = 255  # registers of a thread
# Under masks tiles differ: the longest first, a quarter of each head's, the shortest, for the end.
MASKED_SCHEDULE = Schedule(False, True, kv_group_bytes=16 << 20, group_heads=32, tail_share=4)
FULL_SCHEDULE = Schedule(False, False, kv_group_bytes=0, group_heads=1, tail_share=0)


@dataclass(frozen=True)
class Choice:
    """The free choices of a plan; everything else follows from them and the problem. parts: warps
    that have the same rows, and divide columns of the output."""

    warps: int
    row_tiles: int
    block: int
    stages: int
    ctas: int
    parts: int = 1

    @property
    def tile(self) -> Tile:
        """Query rows of a CTA, and keys that it takes at a time."""
        return Tile(self.warps // self.parts * self.row_tiles * ROW_TILE, self.block)

    @property
    def registers(self) -> int:
        """Registers a thread may have."""
        return min(LARGEST, (1 << 16) // (self.warps * WARP_THREADS * self.ctas) // 8 * 8)


# In the order of preference. Two row tiles a warp: measured +14 and +16 % over one at 128, +5 and
# +6 % at 64, full and causal. At 64, 96 keys: +10 and +4 % over 64; 128 keys are level. At 128 one
# stage of 64 keys is level with two. At 192, where a warp has one row tile, 96 keys: +6 to +12 %
# over 64.
CHOICES = (
    Choice(4, 2, 96, 2, 2),
    Choice(4, 2, 64, 2, 2),
    Choice(4, 2, 64, 1, 2),
    Choice(4, 2, 32, 2, 2),
    Choice(4, 2, 32, 1, 2),
    Choice(4, 1, 96, 1, 2),
    Choice(4, 1, 64, 1, 2),
    Choice(8, 1, 64, 1, 1),
    Choice(4, 1, 32, 1, 2),
    Choice(8, 1, 32, 1, 1),
    Choice(4, 1, 64, 1, 1),
    Choice(4, 1, 32, 1, 1),
)
# Above MAX_HEAD_DIM, behind these. Of 512 columns 64 rows and a block of 32 keys take 128 KiB, 32
# rows 96 of the 99 that the smallest chips have.
OWN_COLUMNS = 256  # of the output, up to which a warp has all
WIDE_CHOICES = (
    Choice(8, 1, 64, 1, 1, parts=2),
    Choice(8, 1, 32, 1, 1, parts=2),
    Choice(4, 1, 32, 1, 1, parts=2),
    Choice(2, 1, 32, 1, 1),
    Choice(2, 1, 32, 1, 1, parts=2),
)
WIDE = 64  # columns of V, above which one stage leaves registers for larger blocks
SCALED_BLOCK = 32  # keys whose tokens have scales: of 64 kernels spill 24 to 900 bytes
# Keys of 8 bits that become 16: of 64 kernels spill 40 to 1,400 bytes. Measured -4 % at 128, +2 and
# +13 % at 192, +2 and -3 % at 256, full and causal, over larger blocks; -17 and -13 % at 64, where
# only what scores add calls for it: of 96 kernels spill up to 588 bytes then.
CONVERTED_BLOCK = 32
# Registers of operands beside scales of tokens: of 168, 60 to 92 bytes. Beside scores of keys that
# become 16 bits, too: up to 132 bytes.
SCALED_LIMIT = 164


def row_bytes(head_dim: int, dtype: DType) -> int:
    """Bytes of a row's boxes, each of which has 128."""
    return BOX_BYTES * -(-head_dim * DTYPE_BYTES[dtype] // BOX_BYTES)


def operand_registers(problem: Problem, choice: Choice) -> int:
    """Registers a thread holds at once: of each of its row tiles the output, a block's scores, and
    four of weights or queries."""
    columns = own_columns(problem, choice)
    return choice.row_tiles * (-(-columns // 8) * 4 + choice.block // 2 + 4)


def own_columns(problem: Problem, choice: Choice) -> int:
    """Columns of the output that a warp has at most: all, or a part of V's boxes."""
    if choice.parts == 1:
        return problem.head_dim_v
    boxes = row_bytes(problem.head_dim_v, problem.dtype_kv) // BOX_BYTES
    return BOX_BYTES // DTYPE_BYTES[problem.dtype_kv] * -(-boxes // choice.parts)


def converts(problem: Problem, target: Target) -> bool:
    """Whether operands of 8 bits become 16, as the target's products of warps take no others."""
    return problem.eight_bit and not target.warp_fp8


def choices(problem: Problem, target: Target) -> Iterator[Choice]:
    """The choices worth trying, the preferred first."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    largest_block = SCALED_BLOCK if problem.token_scales else CHOICES[0].block
    if converts(problem, target) and (largest > WIDE or problem.scores):
        largest_block = CONVERTED_BLOCK
    for choice in CHOICES:
        if (choice.stages == 1 or largest <= WIDE) and choice.block <= largest_block:
            yield choice
    if largest > MAX_HEAD_DIM:
        yield from WIDE_CHOICES


def feasible(problem: Problem, target: Target) -> Iterator[Plan]:
    """Every plan that fits the target, the preferred first."""
    for choice in choices(problem, target):
        if plan := make_plan(problem, choice, target):
            yield plan


def make_plan(problem: Problem, choice: Choice, target: Target) -> Plan | None:
    """The plan of these choices; None where registers or shared memory do not hold it."""
    registers, limit = operand_registers(problem, choice), limit_of(problem, choice, target)
    tile, columns = choice.tile, own_columns(problem, choice)
    if columns > OWN_COLUMNS or choice.parts > 1 and columns >= problem.head_dim_v:
        return None
    smem = lay_out(
        {
            "Q": tile.m * row_bytes(problem.head_dim_qk, problem.dtype_q),
            "K": choice.stages * tile.n * row_bytes(problem.head_dim_qk, problem.dtype_kv),
            "V": choice.stages * tile.n * choice.parts * row_bytes(columns, problem.dtype_kv),
            **({"Bias": choice.parts * score_tile_bytes(tile.m, tile.n)} if problem.bias else {}),
            **({"Scales": choice.warps * tile.n * SCALE_BYTES} if problem.token_scales else {}),
        }
    )
    smem_bytes = smem[-1].offset + smem[-1].bytes
    room = target.smem_share(choice.ctas)
    lazy = LAZY_LOG2_FP8 if problem.eight_bit else LAZY_LOG2
    if registers > limit or smem_bytes > room:
        return None
    return Plan(
        arch=target.name,
        family=FORWARD,
        tile=tile,
        warps=choice.warps,
        row_tiles=choice.row_tiles,
        column_parts=choice.parts,
        own_columns=columns,
        stages=choice.stages,
        ctas=choice.ctas,
        lazy_rescale_log2=lazy,
        eight_bit=problem.eight_bit,
        schedule=MASKED_SCHEDULE if problem.masks or problem.listed else FULL_SCHEDULE,
        smem=smem,
        smem_bytes=smem_bytes,
        threads=choice.warps * WARP_THREADS,
        operand_registers=registers,
        why=explain(choice, registers, limit, smem_bytes, room, lazy),
    )


def limit_of(problem: Problem, choice: Choice, target: Target) -> int:
    """Registers a thread has for its operands."""
    crowded = problem.gather and problem.dropout
    masked = problem.attn_mask and (bool(problem.scores) or problem.asks_mask)
    limit = OPERANDS.get(choice.registers, 0) - masked * MASKED_SCORES
    limit -= crowded * CROWDED[choice.stages]
    scaled = problem.token_scales or (converts(problem, target) and bool(problem.scores))
    return min(limit, SCALED_LIMIT) if scaled else limit


def explain(
    choice: Choice, registers: int, limit: int, smem_bytes: int, room: int, lazy: int
) -> tuple[str, ...]:
    """The plan's choices in prose, for people. room: bytes of shared memory a CTA may use."""
    return (
        f"{choice.warps} warps of {choice.row_tiles * ROW_TILE} query rows: each fragment of keys "
        f"or values serves {choice.row_tiles} product{'s' if choice.row_tiles > 1 else ''}"
        + f", of which {choice.parts} divide the output's columns"
        * (choice.parts > 1),
        f"{choice.block} keys a block: {registers} of {limit} operand registers a thread",
        f"{choice.stages} stage{'s' if choice.stages > 1 else ''} of K and V: {smem_bytes} of "
        f"{room} bytes of shared memory, {choice.ctas} CTA{'s' if choice.ctas > 1 else ''} an SM",
        f"output rescaled only where a maximum grows by more than 2^{lazy}",
    )
