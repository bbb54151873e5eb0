"""Hopper, short sequences: a forward whose tiles are the 64 query rows of one warpgroup, with two
CTAs an SM. Where tiles of two or three warpgroups would be half empty, or too few for the chip."""

from __future__ import annotations

from dataclasses import replace

from ..problem import DTYPE_BYTES, Problem
from ..spec import SHORT_HEAD_DIM
from . import sm90
from .base import Plan

FAMILY = "sm90_fwd_short"


def serves(problem: Problem) -> bool:
    """Whether there is a plan: for dense 16-bit operands that the copy engine moves, without what
    is read or drawn beside the scores."""
    return (
        problem.direction == "fwd"
        and not (problem.decode or problem.varlen or problem.gather or problem.paged)
        and (DTYPE_BYTES[problem.dtype_kv], problem.dtype_o) == (2, problem.dtype_q)
        and not (problem.bias or problem.attn_mask or problem.dropout)
        and max(problem.head_dim_qk, problem.head_dim_v) <= SHORT_HEAD_DIM
    )


def plans(problem: Problem) -> tuple[Plan, ...]:
    """The plan for short calls; none where there is none."""
    if not serves(problem):
        return ()
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    # Measured at 64, 256 tokens: blocks of 128 keys are 2 % faster without masks, of 64 with them.
    block = 128 if largest <= 64 and not problem.masks else 64
    usual = next(sm90.choices(problem))
    choice = replace(
        usual,
        consumers=1,
        block=block,
        k_stages=2,
        take_turns=False,
        q_in_registers=True,
        output_over_q=False,
    )
    plan = sm90.make_plan(problem, choice)
    return (replace(plan, family=FAMILY),) if plan else ()
