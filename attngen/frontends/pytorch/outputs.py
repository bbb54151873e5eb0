"""Outputs of the operations: new tensors of a call's results."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call import operands
from ...call.numbers import Arguments
from ...call.operands import layout_of
from .signature import dtype_of


def output_dtype(q: Tensor, arguments: Arguments) -> torch.dtype:
    """The dtype of a call's output. Raises: SpecError where torch has none of its name."""
    return dtype_of(operands.output_dtype(q, arguments))


def new_outputs(q: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """New tensors for the output and the LSE of a forward call, whose q and v are views."""
    axes = layout_of(arguments.layout).q_format
    rows = "ht" if axes == "thd" else "bhs"
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=output_dtype(q, arguments))
    sizes = [q.shape[axes.index(axis)] for axis in rows]
    return out, q.new_empty(sizes, dtype=torch.float32)
