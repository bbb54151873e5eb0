"""Checking: no figure without a right result. A slice of each result is held to float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..errors import MeasureError
from .peers import Operands, Results
from .workloads import Case

ROWS = 4  # of an output's sequence: the first, the last and what lies evenly between
EPSILON = 1e-3  # of the row's largest output, beyond twice PyTorch's own error
NAMES = ("dq", "dk", "dv")
# Of a head's largest gradient, beyond four times PyTorch's own error: beside the gradient a kernel
# rounds the weights, their gradients and the output, each as much as that, to 16 bits.
GRADIENT_EPSILON = torch.finfo(torch.bfloat16).eps / 2


@dataclass(frozen=True)
class Expected:
    """A slice of one result: which, where in it, its name in a message, the values in float64, and
    the largest error allowed in it."""

    result: int
    index: tuple[int | slice, ...]
    name: str
    values: Tensor
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


def expect_backward(case: Case, operands: Operands) -> tuple[Expected, ...]:
    """All gradients of the first key/value head of the first sequence, and the last of the last,
    with the query heads that share it.

    The limit is the tests': four times the error that the reference itself makes in the operands'
    dtype, and GRADIENT_EPSILON. Needs some ten times the memory of a head's scores in float64.
    """
    heads = dict.fromkeys([(0, 0), (case.batch - 1, case.heads_kv - 1)])
    return tuple(
        each for batch, head in heads for each in _expect_head(case, operands, batch, head)
    )


EXPECT: dict[str, Callable[[Case, Operands], tuple[Expected, ...]]] = {
    "fwd": expect_forward,
    "bwd": expect_backward,
}


def check(results: Results, expected: tuple[Expected, ...]) -> None:
    """Compares those slices of the results.

    Raises: MeasureError with the first that is wrong.
    """
    for each in expected:
        result = results[each.result]
        found = result[each.index].double()
        if found.shape != each.values.shape:
            raise MeasureError(f"wrong shape: {tuple(result.shape)}")
        error = float((found - each.values).abs().max())
        if not error <= each.limit:  # so that NaN is wrong
            off = f"off by {error:.2e} > {each.limit:.2e}"
            raise MeasureError(f"wrong result: {off} in {each.name}")


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
    return Expected(0, (batch, row), f"sequence {batch}, row {row}", exact[0, 0], limit)


def _expect_head(case: Case, operands: Operands, batch: int, head: int) -> list[Expected]:
    group = case.heads_q // case.heads_kv
    queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
    places = [(slice(batch, batch + 1), slice(None), heads) for heads in (queries, keys, keys)]
    given = [each[place] for each, place in zip(operands, [*places, places[0]], strict=True)]
    exact = _gradients(case, [each.double() for each in given])
    rounded = _gradients(case, given)
    found = []
    for number, (truth, other) in enumerate(zip(exact, rounded, strict=True)):
        torch_error = float((other.double() - truth).abs().max())
        limit = 4 * torch_error + GRADIENT_EPSILON * float(truth.abs().max())
        name = f"{NAMES[number]} of sequence {batch}, key/value head {head}"
        found.append(Expected(number, places[number], name, truth, limit))
    return found


def _gradients(case: Case, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    *operands, d_o = given
    q, k, v = (each.detach().requires_grad_() for each in operands)
    with torch.enable_grad():
        out, _ = reference.attention(q, k, v, mask="causal" if case.causal else "none")
    return torch.autograd.grad(out, (q, k, v), d_o)
