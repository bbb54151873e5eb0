"""Operands of the torch operations: their sizes, what kernels cannot take, the outputs' shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SpecError
from ..launch import Extent, Scalars
from ..layouts import parse

SCALE_LIMIT = 2.0**127  # in log2 units it must still be a float32


def memory_axes(layout: str) -> str:
    """Order of the axes b, s, h, d of all operands. Raises: SpecError for any other layout."""
    parsed = parse(layout)
    if not parsed.dense:
        raise SpecError(f"layout={layout!r} has no kernels; available: bshd, sbhd, bhsd")
    return parsed.q_format


def outputs(q: Tensor, v: Tensor, layout: str, partial: bool) -> tuple[Tensor, Tensor]:
    """New tensors for the output and the LSE of a forward call."""
    axes = memory_axes(layout)
    batch, seq, heads = (q.shape[axes.index(axis)] for axis in "bsh")
    dtype = torch.float32 if partial else q.dtype
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_empty((batch, heads, seq), dtype=torch.float32)


def extent(tensor: Tensor, axes: str) -> Extent:
    """Sizes and strides of a tensor whose axes are in the order of `axes`."""
    order = [axes.index(axis) for axis in "bshd"]
    sizes = (tensor.shape[axis] for axis in order)
    strides = (tensor.stride(axis) for axis in order[:3])
    return Extent(*sizes, *strides)


def violations(
    tensors: dict[str, Tensor], extents: dict[str, Extent], scalars: Scalars
) -> list[str]:
    """Everything about the operands that the kernels cannot take."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    reasons: list[str] = []
    for name, tensor in tensors.items():
        if tensor.device != tensors["q"].device:
            reasons.append(f"{name} is on {tensor.device}, q on {tensors['q'].device}; move one")
        if name != "o" and tensor.dtype != tensors["q"].dtype:
            reasons.append(f"{name} is {tensor.dtype}, q {tensors['q'].dtype}; they must be equal")
        if tensor.numel() and tensor.stride(-1) != 1:
            reasons.append(f"{name}: the last axis has stride {tensor.stride(-1)}, needs 1")
        size = tensor.element_size()
        loose = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if name != "o" and any(n > 1 and stride * size % 16 for n, stride in loose):
            reasons.append(
                f"{name}: strides {tensor.stride()} of {tensor.dtype}; all but the last must be "
                "multiples of 16 bytes"
            )
    if (k.batch, k.seq, k.heads) != (v.batch, v.seq, v.heads) or q.batch != k.batch:
        reasons.append(
            f"batch, length and heads do not agree: q {q[:3]}, k {k[:3]}, v {v[:3]} "
            "(batch, length, heads)"
        )
    if q.dim != k.dim:
        reasons.append(f"head dims of q and k differ: {q.dim} and {k.dim}")
    if q.heads and (not k.heads or q.heads % k.heads):
        reasons.append(f"{q.heads} query heads are not a multiple of {k.heads} key/value heads")
    if not (0 < scalars.softmax_scale < SCALE_LIMIT):
        reasons.append(
            f"softmax_scale={scalars.softmax_scale}: kernels take a positive float32 number"
        )
    return reasons
