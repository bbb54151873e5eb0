"""Checking: no figure without a right result. A slice of the output is held to float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..errors import MeasureError
from .peers import Operands
from .workloads import Case

ROWS = 4  # in a sequence: the first, the last and what lies evenly between
EPSILON = 1e-3  # of the row's largest output, beyond twice PyTorch's own error


@dataclass(frozen=True)
class Expected:
    """One output row of all heads: float64 [h_q, d_v], and the largest error allowed in it."""

    batch: int
    row: int
    out: Tensor
    limit: float


def expect_forward(case: Case, operands: Operands) -> tuple[Expected, ...]:
    """Rows of the first and the last sequence.

    The limit is the tests': twice the error that the reference itself makes in the operands'
    dtype, and EPSILON.
    """
    rows = sorted({(case.length - 1) * n // (ROWS - 1) for n in range(ROWS)})
    return tuple(
        _expect_row(case, operands, batch, row)
        for batch in sorted({0, case.batch - 1})
        for row in rows
    )


def check(out: Tensor, expected: tuple[Expected, ...]) -> None:
    """Compares those rows of an output [b, s, h_q, d_v].

    Raises: MeasureError with the first row that is wrong.
    """
    for each in expected:
        found = out[each.batch, each.row].double()
        if found.shape != each.out.shape:
            raise MeasureError(f"wrong shape: {tuple(out.shape)}")
        error = float((found - each.out).abs().max())
        if not error <= each.limit:  # so that NaN is wrong
            where = f"sequence {each.batch}, row {each.row}"
            raise MeasureError(f"wrong result: off by {error:.2e} > {each.limit:.2e} in {where}")


def _expect_row(case: Case, operands: Operands, batch: int, row: int) -> Expected:
    keys = row + 1 if case.causal else case.length
    sequence = slice(batch, batch + 1)
    q = operands.q[sequence, row : row + 1]
    k, v = operands.k[sequence, :keys], operands.v[sequence, :keys]
    with torch.no_grad():
        exact, _ = reference.attention(q.double(), k.double(), v.double())
        rounded, _ = reference.attention(q, k, v)
    torch_error = float((rounded.double() - exact).abs().max())
    limit = 2 * torch_error + EPSILON * float(exact.abs().max())
    return Expected(batch, row, exact[0, 0], limit)
