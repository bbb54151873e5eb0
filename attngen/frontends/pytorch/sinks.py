"""The gradient of a sink, from what the backward's first kernel leaves of every row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...runtime.program import KernelEntry
from ...runtime.run_time import LOG2_E, Extent, row_blocks


@dataclass(frozen=True)
class WorkspaceRows:
    """Where LSE in log2 units and D lie in the workspace, float32 [batch, heads, rows] each."""

    shape: tuple[int, int, int]
    lse_log2: int
    d: int

    def of(self, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """LSE and D. After the launches LSE is infinite where there is no row or nothing to weigh:
        +inf, or -inf of large scores."""
        floats, (_, heads, rows) = workspace.view(torch.float32), self.shape
        lse_log2, d = (
            floats.as_strided(self.shape, (heads * rows, rows, 1), offset // 4)
            for offset in (self.lse_log2, self.d)
        )
        return lse_log2, d

    def reset(self, workspace: Tensor) -> None:
        """Makes rows such that nothing is weighed: kernels leave out those of no sequence."""
        lse_log2, d = self.of(workspace)
        lse_log2.fill_(math.inf)
        d.zero_()


def rows_of(
    prepares: KernelEntry, offsets: Mapping[str, int], q: Extent, sequences: int | None
) -> WorkspaceRows:
    """Where the kernel that prepares a backward leaves the rows of a call."""
    known = q.batch if sequences is None else sequences
    shape = (q.batch, q.heads, prepares.row_block * row_blocks(prepares, q, known))
    return WorkspaceRows(shape, offsets["lse_log2"], offsets["d"])


def gradient(sink: Tensor, rows: WorkspaceRows, workspace: Tensor, d_unit: float) -> Tensor:
    """-Σ exp(sink - LSE) D over sequences and rows, float32 [h_q], the same bits on every run.
    d_unit: what D is relative to."""
    lse_log2, d = rows.of(workspace)
    # Its magnitude: of a row that a sink is part of, no score is far below.
    above = torch.where(lse_log2 == -math.inf, math.inf, lse_log2)
    weights = torch.sub(sink[:, None] * LOG2_E, above).exp2_()
    return weights.mul_(d).sum((0, 2)).mul_(-d_unit)
