"""Roofline: what bounds a kernel that multiplies tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..spec.problem import DTYPE_BYTES, Problem
from ..targets.target import Target
from .base import TiledPlan


@dataclass(frozen=True)
class Block:
    """A full block of a tile: products over the head dim of Q, and over V's; whether keys and
    values come block by block, or queries and output gradients; CTAs that share an SM, and whether
    each takes tile after tile."""

    of_qk: float
    of_v: float
    keys_come: bool
    ctas: int
    persistent: bool = True


def aim_of(problem: Problem, plan: TiledPlan, block: Block, target: Target) -> Iterator[str]:
    """Cycles of the tensor cores and of the exponentials for a block, and how often a loaded byte
    of the operands that come block by block is used."""
    d, d_v, size = problem.head_dim_qk, problem.head_dim_v, DTYPE_BYTES[problem.dtype_kv]
    pairs = plan.tile.m * plan.tile.n
    flops = 2 * pairs * (block.of_qk * d + block.of_v * d_v)
    mma = flops * size / target.mma_flops
    exponentials = pairs / target.exponentials
    binding = "tensor cores" if mma > exponentials else "exponentials"
    reuse = flops / ((plan.tile.n if block.keys_come else plan.tile.m) * (d + d_v) * size)
    yield (
        f"aims at the {binding}: {max(mma, exponentials):.0f} cycles a block "
        f"({mma:.0f} of products, {exponentials:.0f} of exponentials)"
    )
    yield (
        f"{reuse:.0f} FLOPs for each byte of {'K and V' if block.keys_come else 'Q and dO'} that "
        f"an SM loads; {block.ctas} {'persistent ' if block.persistent else ''}"
        f"CTA{'s' if block.ctas > 1 else ''} an SM"
    )
