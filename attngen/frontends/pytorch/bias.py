"""Biases as kernels read them, and their gradients as calls return them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.bias_gradient import BiasGradient
from ...spec.layouts import is_boxed

MOST_SPREAD = 2  # elements of memory that a copy may take for each of the bias


def readable(bias: Tensor) -> Tensor:
    """The 16-bit bias [.., s_q, s_kv], or, where it has several rows and the copy engine could not
    read it, a copy that it can, made on the current stream: a warp of the forward that copied them
    would take ten times as long. What is broadcast is copied once. A small part of a larger tensor
    that only begins off a multiple of 16 bytes is left to that warp: a copy has its strides."""
    if bias.ndim < 2 or 1 in bias.shape[-2:] or 0 in bias.stride()[-2:]:
        return bias
    in_place = is_boxed(bias.shape, bias.stride(), bias.element_size())
    if in_place and bias.data_ptr() % 16 == 0:
        return bias
    whole = bias[tuple(slice(1) if step == 0 else slice(None) for step in bias.stride())]
    strides = whole.stride()  # kept where it only begins elsewhere: so are launches, by strides
    if in_place:
        steps = zip(whole.shape, strides, strict=True)
        if sum((size - 1) * step for size, step in steps) >= MOST_SPREAD * whole.numel():
            return bias
    else:
        *outer, columns = whole.shape
        strides = torch.empty(*outer, -(-columns // 8) * 8, device="meta").stride()
    copy = torch.empty_strided(whole.shape, strides, dtype=bias.dtype, device=bias.device)
    return copy.copy_(whole).expand(bias.shape)


def finished(gradient: BiasGradient, made: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a bias, of what its kernel made."""
    if not gradient.sums:
        return made
    total = made.sum(gradient.summed, keepdim=True) if gradient.summed else made
    return total.to(dtype).unsqueeze(2).view(gradient.shape)
