"""Rows of a backward's workspace, of which gradients such as a sink's are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..runtime.program import KernelEntry
from ..runtime.run_time import Extent, row_blocks


@dataclass(frozen=True)
class WorkspaceRows:
    """Where LSE in log2 units and D lie in the workspace, float32 [batch, heads, rows] each."""

    shape: tuple[int, int, int]
    lse_log2: int
    d: int


def rows_of(
    prepares: KernelEntry, offsets: Mapping[str, int], q: Extent, sequences: int | None
) -> WorkspaceRows:
    """Where the kernel that prepares a backward leaves the rows of a call."""
    known = q.batch if sequences is None else sequences
    shape = (q.batch, q.heads, prepares.row_block * row_blocks(prepares, q, known))
    return WorkspaceRows(shape, offsets["lse_log2"], offsets["d"])
