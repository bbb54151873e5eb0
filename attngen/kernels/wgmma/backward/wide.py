"""Head dims above 256: two CTAs, a cluster, share a tile. Each has half of the columns of every
operand and gradient, so that registers and shared memory hold what they hold of half the head dim;
of scores, and of their gradients, each makes the sum over its own columns, and adds the other's,
which comes through the cluster's shared memory."""

from __future__ import annotations

from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import Problem
from ..shared import LIGHT_SCORES, boxes_of

BOX_COLUMNS = 64  # of 16 bits in 128 bytes
# Queries a block and its buffers, of the dK and dV kernel; where sums are sent a block ahead, three
# blocks at least are in use.
AHEAD_BLOCKS = ((48, 4), (48, 3), (32, 4), (32, 3))
# Measured with half of 512 columns each: 32 in three stages 1.08 to 1.16 times 48 in two.
BLOCKS = ((64, 3), (48, 3), (64, 2), (32, 3), (48, 2), (32, 2))
# The most columns of a CTA, of which alone sums are sent ahead: measured with half of 512 columns
# each 1.04 to 1.11, with half of 384 and 320 0.87.
WIDEST_COLUMNS = 256
AHEAD_OPERANDS = 208  # values of dQ, two blocks' S and dP, and packed dS that a thread may have


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


def sends_ahead(problem: Problem, *, queries: bool = False) -> bool:
    """Whether registers hold the sums of two blocks, and blocks are small, so that what CTAs send
    each other is on its way beside all products of a block. queries: of the kernel of dQ, which has
    two kinds of sums."""
    crowded = problem.gather or problem.bias or problem.attn_mask
    heavy = len(problem.scores) > 1 or not LIGHT_SCORES.issuperset(problem.scores)
    several = [problem.varlen, problem.dropout, heavy]
    if queries:
        crowded = crowded or heavy
        several = [problem.varlen or problem.positions, problem.dropout, bool(problem.scores)]
    return is_widest(problem) and not (crowded or sum(several) > 1)


def forgets_rows(problem: Problem) -> bool:
    """Whether what follows from the number of a thread's row is worked out with each block:
    registers to keep it in would spill."""
    crowded = problem.gather or problem.bias or problem.attn_mask or problem.dropout
    return is_wide(problem) and crowded


def is_widest(problem: Problem) -> bool:
    """Whether a CTA has as many columns as any."""
    return is_wide(problem) and max(cta_columns(problem)) == WIDEST_COLUMNS
