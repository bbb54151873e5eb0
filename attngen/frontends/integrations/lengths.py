"""Lengths of sequences as attngen's calls say them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed(side: str, ends: Tensor, used: Tensor | None) -> dict[str, Tensor]:
    """The lengths of packed sequences of one side, q or kv, by the names of `attention`.

    ends: [b + 1], where each begins and the last one ends; used: [b], tokens of each that take
    part, from its first on; None for all.
    """
    if used is None:
        return {f"cu_seqlens_{side}": ends}
    starts = ends.to(torch.int32)
    within = torch.minimum(used.to(torch.int32).clamp(min=0), starts.diff())
    cumulative = pad(within.cumsum(0), (1, 0)).to(torch.int32)
    return {f"cu_seqlens_{side}": cumulative, f"cu_seqlens_{side}_padded": starts}


def paged(table: Tensor | None, used: Any) -> dict[str, Any]:
    """The keys of packed queries that lie in pages, or of none, by the names of `attention`."""
    if table is None:
        return {"layout": "thd"}
    return {"layout": "paged_kv_thd_bshd_bshd", "page_table": table, "seqused_kv": used}
