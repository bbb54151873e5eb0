"""The gradient of a sink, from what the backward's first kernel leaves of every row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...call.sinks import WorkspaceRows
from ...runtime.run_time import LOG2_E


def rows_in(workspace: Tensor, rows: WorkspaceRows) -> tuple[Tensor, Tensor]:
    """LSE and D. After the launches LSE is infinite where there is no row or nothing to weigh:
    +inf, or -inf of large scores."""
    floats, (_, heads, length) = workspace.view(torch.float32), rows.shape
    lse_log2, d = (
        floats.as_strided(rows.shape, (heads * length, length, 1), offset // 4)
        for offset in (rows.lse_log2, rows.d)
    )
    return lse_log2, d


def reset(workspace: Tensor, rows: WorkspaceRows) -> None:
    """Make rows such that nothing is weighed: kernels leave out those of no sequence."""
    lse_log2, d = rows_in(workspace, rows)
    lse_log2.fill_(math.inf)
    d.zero_()


def gradient(sink: Tensor, rows: WorkspaceRows, workspace: Tensor, d_unit: float) -> Tensor:
    """-Σ exp(sink - LSE) D over sequences and rows, float32 [h_q], the same bits on every run.
    d_unit: what D is relative to."""
    lse_log2, d = rows_in(workspace, rows)
    # Its magnitude: of a row that a sink is part of, no score is far below.
    above = torch.where(lse_log2 == -math.inf, math.inf, lse_log2)
    weights = torch.sub(sink[:, None] * LOG2_E, above).exp2_()
    return weights.mul_(d).sum((0, 2)).mul_(-d_unit)
