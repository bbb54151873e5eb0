"""Outputs of the operations: new tensors of a call's results."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import operands
from ...call.numbers import Arguments
from .signature import dtype_of


def output_dtype(q: Tensor, arguments: Arguments) -> torch.dtype:
    """The dtype of a call's output. Raises: SpecError where torch has none of its name."""
    return dtype_of(operands.output_dtype(q, arguments))


def new_outputs(q: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """New tensors for the output and the LSE of a forward call, whose q and v are views."""
    out, lse = operands.output_shapes(q, v, arguments)
    dtype = output_dtype(q, arguments)
    return q.new_empty(out, dtype=dtype), q.new_empty(lse, dtype=torch.float32)
