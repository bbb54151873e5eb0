"""View of an axis along which kernels have tiles, as they order these where lengths vary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..spec.problem import DTYPE_BYTES, Problem

if TYPE_CHECKING:
    from .base import Axis


@dataclass(frozen=True)
class AxisView:
    """Tiles of queries or of keys, as kernels order them where lengths vary.

    side: `query` or `key`; own, other: C++, the sequences of this axis and the other one; schedule,
    heads: parameters, the order that a kernel before may have written, and the number of heads.
    rows: of a tile. tail_share: one tile of so many is kept for the end, 0 keeps none. positions:
    of the other axis, as many as L2 keeps for heads that are worked on together; group_heads: at
    most so many. follows: whether tiles follow a window. orders_few: whether the kernel orders few
    sequences itself.
    """

    of_queries: bool
    side: str
    own: str
    other: str
    schedule: str
    heads: str
    rows: int
    tail_share: int
    positions: int
    group_heads: int
    follows: bool
    orders_few: bool


def axis_view(
    problem: Problem, axis: Axis, *, of_queries: bool, orders_few: bool = False
) -> AxisView:
    """An axis of tiles. orders_few: whether the kernel has room to order few sequences itself."""
    # Queries and output gradients of 8 bits lie there transposed, too.
    element_bytes = DTYPE_BYTES[problem.dtype_q] if of_queries else 2
    row_bytes = (problem.head_dim_qk + problem.head_dim_v) * element_bytes
    sums_bytes = problem.head_dim_qk * 4 if axis.sums else 0
    own, other = ("q", "kv") if of_queries else ("kv", "q")
    return AxisView(
        of_queries=of_queries,
        side="query" if of_queries else "key",
        own=f"{own}_sequence(p)",
        other=f"{other}_sequence(p)",
        schedule=f"{own}_schedule",
        heads=f"heads_{own}",
        rows=axis.rows,
        tail_share=axis.tail_share,
        positions=axis.group_bytes // (row_bytes + sums_bytes),
        group_heads=axis.group_heads,
        follows=axis.follows,
        orders_few=orders_few,
    )
