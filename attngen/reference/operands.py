"""Operands of a call as the definition reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..spec.layouts import Layout, size

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Operands:
    """Q, K and V of a call as views in their formats, with the sizes read off them."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    batch: int

    @property
    def h_q(self) -> int:
        return size(self.q.shape, self.layout.q_format, "h")

    @property
    def h_kv(self) -> int:
        return size(self.k.shape, self.layout.kv_format, "h")

    @property
    def dense_s_q(self) -> int | None:
        """Positions that each sequence of Q has room for; None where Q is `thd`."""
        fmt = self.layout.q_format
        return None if fmt == "thd" else size(self.q.shape, fmt, "s")

    @property
    def dense_s_kv(self) -> int | None:
        """Positions that each sequence of K has room for; None for `thd` and paged K."""
        fmt = self.layout.kv_format
        if fmt == "thd" or self.layout.paged:
            return None
        return size(self.k.shape, fmt, "s")
