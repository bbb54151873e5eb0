"""Head dims above 256: two CTAs, a cluster, share a tile. Each has half of the columns of every
operand and gradient, so that registers and shared memory hold what they hold of half the head dim;
of scores, and of their gradients, each makes the sum over its own columns, and adds the other's,
which comes through the cluster's shared memory."""

from __future__ import annotations

from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import Problem
from ..shared import boxes_of

BOX_COLUMNS = 64  # of 16 bits in 128 bytes
SUM_STAGES = 2  # buffers of the other CTA's sums: one is sent while the one before is read


def is_wide(problem: Problem) -> bool:
    """Whether head dims are above those that one CTA has."""
    return max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM


def cta_columns(problem: Problem) -> tuple[int, int]:
    """Columns of Q and K, and of V, that a CTA has: all, or half of the boxes, of which the second
    CTA's may lie beyond the head dim, where they are zeros."""
    dims = problem.head_dim_qk, problem.head_dim_v
    if not is_wide(problem):
        return dims
    d, d_v = (BOX_COLUMNS * -(-boxes_of(dim) // 2) for dim in dims)
    return d, d_v
