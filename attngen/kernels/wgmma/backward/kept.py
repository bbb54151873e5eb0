"""dS in memory: above head dim 128 the kernel of dK and dV may leave it there, a round of heads at
a time, so that dQ is one product, not three."""

from __future__ import annotations

from ....spec.attention_spec import MAX_HEAD_DIM
from ....spec.problem import Problem
from .wide import cta_columns

KEPT_ROWS = 192  # queries of a tile of dQ, 64 of each of three consumers
MOST_STAGES = 6
FEWEST_COLUMNS = 128  # above which dQ takes longer to make than dS to be read
# Columns of dQ that an instruction can add to beside three consumers, and those that the first of
# two does where there are more.
MOST_COLUMNS, FIRST_COLUMNS = 192, 128


def keeps_ds(problem: Problem) -> bool:
    """Whether dS can be left in memory: that of a tile of queries, and of keys of which each sees
    some, is there as a whole."""
    if max(problem.head_dim_qk, problem.head_dim_v) <= FEWEST_COLUMNS:
        return False
    dense = problem.q_seq == problem.kv_seq == "dense"
    others = problem.gather or problem.listed or problem.bias or problem.wide_gradients
    return dense and not (others or problem.positions) and {*problem.masks} <= {"causal", "window"}


def dq_parts(problem: Problem) -> tuple[int, int]:
    """In how many parts of so many columns dQ is made of dS."""
    d = problem.head_dim_qk
    return (1, d) if d <= MAX_HEAD_DIM else (2, cta_columns(problem)[0])
