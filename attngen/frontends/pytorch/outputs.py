"""Outputs of the operations: new tensors of a call's results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...call import memory, operands
from ...call.memory import order_of
from ...call.numbers import Arguments
from ...call.tensors import ordered_strides
from .signature import dtype_of


def output_dtype(q: Tensor, arguments: Arguments) -> torch.dtype:
    """The dtype of a call's output. Raises: SpecError where torch has none of its name."""
    return dtype_of(operands.output_dtype(q, arguments))


def new_outputs(q: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """New tensors for the output and the LSE of a forward call, whose q and v are views."""
    out, lse = operands.output_shapes(q, v, arguments)
    dtype, order = output_dtype(q, arguments), memory.order_in(arguments)
    return new_ordered(q, out, order, dtype), q.new_empty(lse, dtype=torch.float32)


def new_ordered(like: Tensor, shape: Sequence[int], order: str, dtype: torch.dtype) -> Tensor:
    """A new tensor whose axes lie in memory in an order, contiguous where that is empty."""
    if not order:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, ordered_strides(shape, order), dtype=dtype)


def laid_out(tensor: Tensor, order: str) -> Tensor:
    """The tensor, or a copy whose axes lie in memory in that order."""
    if not order or order_of(tensor) == order:
        return tensor
    axes = [int(axis) for axis in order]
    return tensor.permute(axes).contiguous().permute([axes.index(x) for x in range(len(axes))])
