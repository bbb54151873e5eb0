"""Operands of the torch operations: their sizes, what kernels cannot take, the outputs' shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import SpecError
from ..layouts import parse
from ..run_time import UNBOUNDED, Extent, Scalars

SCALE_LIMIT = 2.0**127  # in log2 units it must still be a float32


def memory_axes(layout: str) -> str:
    """Order of the axes b, s, h, d of all operands. Raises: SpecError for any other layout."""
    parsed = parse(layout)
    if not parsed.dense:
        raise SpecError(f"layout={layout!r} has no kernels; available: bshd, sbhd, bhsd")
    return parsed.q_format


def outputs(q: Tensor, v: Tensor, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """New tensors for the output, of this dtype, and the LSE of a forward call."""
    axes = memory_axes(layout)
    batch, seq, heads = (q.shape[axes.index(axis)] for axis in "bsh")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_empty((batch, heads, seq), dtype=torch.float32)


def extent(tensor: Tensor, axes: str) -> Extent:
    """Sizes and strides of a tensor whose axes are in the order of `axes`."""
    order = [axes.index(axis) for axis in "bshd"]
    sizes = (tensor.shape[axis] for axis in order)
    strides = (tensor.stride(axis) for axis in order[:3])
    return Extent(*sizes, *strides)


def scalars_of(scale: float, left: int, right: int, bottom_right: bool) -> Scalars:
    """The run-time values of a call; a window side of −1, or too long to end, is unbounded."""
    left, right = (side if 0 <= side < UNBOUNDED else UNBOUNDED for side in (left, right))
    return Scalars(scale, left, right, bottom_right)


def violations(
    tensors: dict[str, Tensor], extents: dict[str, Extent], scalars: Scalars
) -> list[str]:
    """Everything about the operands, but for their dtypes, that the kernels cannot take."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    reasons = device_violations(tensors)
    for name, tensor in tensors.items():
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


def device_violations(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Those of the tensors that are not where q is."""
    device = next(tensor.device for tensor in tensors.values() if tensor is not None)
    return [
        f"{name} is on {tensor.device}, q on {device}; move one"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.device != device
    ]
