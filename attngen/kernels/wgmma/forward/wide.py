"""Head dims above 256: a forward of 64 query rows whose output, more than the registers of one
warpgroup hold, two warpgroups share by columns. One computes scores and weights, and hands these to
the other through shared memory. Of one box of columns there is nothing to share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import Problem
from ....targets.target import Target
from ..shared import boxes_of
from .choices import LAZY_LOG2, Choice
from .feasible import make_plan
from .plan import WIDE, Plan, SoftmaxOrder

BLOCKS = (64, 48, 32)  # keys, whose weights are a box of 128 bytes a row at most
STAGES = ((2, 2), (2, 1), (1, 1))  # of K and of V


def is_wide(problem: Problem) -> bool:
    """Whether head dims are above those of other forwards, which have room for wider queries beside
    a box of values."""
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    return largest > MAX_HEAD_DIM and boxes_of(problem.head_dim_v) > 1


def choices(problem: Problem) -> Iterator[Choice]:
    """The choices, the preferred first: the largest block, and as many stages as have room."""
    lazy = 0 if problem.max_logit else LAZY_LOG2
    softmax = SoftmaxOrder(lazy, rescale_first=False, pair_sums=True)
    # Threads that copy rows, or find pages, do so for their own CTA.
    pairs = problem.kv_fetch == "tma"
    for block, (k_stages, v_stages) in itertools.product(BLOCKS, STAGES):
        yield Choice(
            *(1, block, k_stages, v_stages, False, False, False, softmax),
            stores_rows=True,
            shares_output=True,
            pairs=pairs,
        )


def plans(problem: Problem, target: Target) -> tuple[Plan, ...]:
    """The plans, the preferred first; none where shared memory holds no block."""
    found = (make_plan(problem, choice, target) for choice in choices(problem))
    return tuple(plan for plan in found if plan and plan.family == WIDE)
