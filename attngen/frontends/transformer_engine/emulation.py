"""`FP8EmulationFunc`: rounding to 8 bits and back, where an unfused attention stands for FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORWARD = ("S_quantizer", "O_quantizer")
BACKWARD = ("dO_quantizer", "dP_quantizer")


class FP8EmulationFunc(torch.autograd.Function):
    """Three tensors as a quantizer's FP8 numbers stand for them.

    `apply(t1, t2, t3, quantizer, name, layout)`: QKV_quantizer rounds all three with one scale,
    S_quantizer and O_quantizer the first; of gradients dQKV_quantizer, dO_quantizer and
    dP_quantizer do the same. Else they pass as they are, None too. The layout, which says nothing
    of numbers, is not read.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor1: Tensor,
        tensor2: Tensor | None,
        tensor3: Tensor | None,
        quantizer: Any,
        quantizer_name: str,
        qkv_layout: str | None = None,
    ) -> Any:
        ctx.quantizer, ctx.name = quantizer, quantizer_name
        tensors = (tensor1, tensor2, tensor3)
        return _rounded(tensors, quantizer, quantizer_name, "QKV_quantizer", FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = _rounded(gradients, ctx.quantizer, ctx.name, "dQKV_quantizer", BACKWARD)
        return *found, None, None, None


def _rounded(
    tensors: tuple[Any, ...], quantizer: Any, name: str, of_all: str, of_first: tuple[str, ...]
) -> tuple[Any, ...]:
    """The tensors, those that the quantizer of this name stores as it does."""
    if name == of_all:
        present = [x for x in tensors if x is not None]
        joined = torch.cat([x.flatten() for x in present])
        parts = quantizer(joined).dequantize(dtype=joined.dtype).split([x.numel() for x in present])
        made = iter([part.view(x.shape) for part, x in zip(parts, present, strict=True)])
        return tuple(None if x is None else next(made) for x in tensors)
    first, *rest = tensors
    if name in of_first:
        return quantizer(first).dequantize(dtype=first.dtype), *rest
    # Views: autograd takes no input for an output that has another gradient.
    return tuple(None if x is None else x.view_as(x) for x in tensors)
