"""Short sequences and narrow windows: a forward whose tiles are the 64 query rows of one
warpgroup, with two or three CTAs an SM. Where tiles of two to four warpgroups would be half empty,
too few for the chip, or see more keys than their rows do."""

from __future__ import annotations

from dataclasses import replace

from ....fragments.program import has_program
from ....spec.attention_spec import SHORT_HEAD_DIM
from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import Target
from .choices import choices
from .feasible import make_plan
from .plan import SHORT, Plan


def serves(problem: Problem) -> bool:
    """Whether there is a plan: for dense 16-bit operands that the copy engine moves, without what
    is read or drawn beside the scores, or comes from a callable, of which each kernel is new."""
    return (
        problem.direction == "fwd"
        and not (problem.decode or problem.varlen or problem.gather or problem.paged)
        and (DTYPE_BYTES[problem.dtype_kv], problem.dtype_o) == (2, problem.dtype_q)
        and not (problem.bias or problem.attn_mask or problem.dropout)
        and not has_program(problem.scores)
        and max(problem.head_dim_qk, problem.head_dim_v) <= SHORT_HEAD_DIM
    )


def plans(problem: Problem, target: Target) -> tuple[Plan, ...]:
    """The plan for short calls; none where there is none."""
    if not serves(problem):
        return ()
    # Up to 64 registers hold three CTAs with blocks of 64 keys: measured at 64 up to 1.13 times as
    # fast as two with masks, 1.2 under windows; without masks two with 128 keys are level.
    few = max(problem.head_dim_qk, problem.head_dim_v) <= 64
    ctas = 3 if few and problem.masks else 2
    usual = next(choices(problem))
    choice = replace(
        usual,
        consumers=1,
        block=128 if few and ctas == 2 else 64,
        k_stages=2,
        take_turns=False,
        q_in_registers=True,
        output_over_q=False,
        ctas=ctas,
    )
    plan = make_plan(problem, choice, target)
    return (replace(plan, family=SHORT),) if plan else ()
