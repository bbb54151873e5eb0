"""Operands of the torch operations: their sizes, the outputs' shapes, and what a launch is told."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import SpecError
from ..layouts import parse
from ..reference.dropout import drop_threshold, keep_scale
from ..reference.fp8 import is_fp8
from ..run_time import UNBOUNDED, Extent, Scalars
from ..spec import AttentionSpec, dtype_name
from . import mask_bits
from .signature import Arguments


def memory_axes(layout: str) -> str:
    """Order of the axes b, s, h, d of all operands. Raises: SpecError for any other layout."""
    parsed = parse(layout)
    if not parsed.dense:
        raise SpecError(f"layout={layout!r} has no kernels; available: bshd, sbhd, bhsd")
    return parsed.q_format


def output_dtype(q: Tensor, arguments: Arguments) -> torch.dtype:
    """That of a call's output."""
    return arguments.out_dtype or (torch.bfloat16 if is_fp8(q.dtype) else q.dtype)


def new_outputs(q: Tensor, v: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """New tensors for the output and the LSE of a forward call."""
    axes = memory_axes(arguments.layout)
    batch, seq, heads = (q.shape[axes.index(axis)] for axis in "bsh")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=output_dtype(q, arguments))
    return out, q.new_empty((batch, heads, seq), dtype=torch.float32)


def extent(tensor: Tensor, axes: str) -> Extent:
    """Sizes and strides of a tensor whose axes are in the order of `axes`."""
    order = [axes.index(axis) for axis in "bshd"]
    sizes = (tensor.shape[axis] for axis in order)
    strides = (tensor.stride(axis) for axis in order[:3])
    return Extent(*sizes, *strides)


def extents_of(tensors: Mapping[str, Tensor], axes: str) -> dict[str, Extent]:
    """Those of several tensors in one order."""
    return {name: extent(tensor, axes) for name, tensor in tensors.items()}


def spec_of(
    q: Tensor, k: Tensor, v: Tensor, optional: Mapping[str, Tensor | None], arguments: Arguments
) -> AttentionSpec:
    """The spec of the forward kernel that serves a call."""
    sides = (arguments.window_left, arguments.window_right)
    return AttentionSpec(
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=dtype_name(q.dtype),
        kv_dtype=dtype_name(k.dtype),
        out_dtype=dtype_name(output_dtype(q, arguments)),
        mask=arguments.mask,
        window=any(0 <= side < UNBOUNDED for side in sides),
        attn_mask=optional["attn_mask"] is not None,
        dropout=arguments.dropout_p > 0,
    )


def softmax_scale_of(q: Tensor, arguments: Arguments) -> float:
    """The factor of the scores, 1/√d where a call names none."""
    scale = arguments.softmax_scale
    return float(q.shape[-1]) ** -0.5 if scale is None and q.shape[-1] else scale or 0.0


def scalars_of(
    q: Tensor,
    optional: Mapping[str, Tensor | None],
    arguments: Arguments,
    extents: Mapping[str, Extent],
) -> Scalars:
    """The run-time values of a call; a window side of −1, or too long to end, is unbounded."""
    sides = (arguments.window_left, arguments.window_right)
    left, right = (side if 0 <= side < UNBOUNDED else UNBOUNDED for side in sides)
    scale, aligned = softmax_scale_of(q, arguments), arguments.bottom_right
    numbers = {**_descale_numbers(optional), **dropout_numbers(arguments.dropout_p)}
    if (mask := optional["attn_mask"]) is not None:
        numbers |= mask_bits.numbers_of(mask.shape, extents["q"].seq, extents["k"].seq)
    return Scalars(scale, left, right, aligned, numbers)


def dropout_numbers(p: float) -> dict[str, int | float]:
    """What kernels know of the drop probability: the threshold as attngen/dropout.cuh takes it, and
    what the weights that are kept are multiplied by, with its reciprocal."""
    threshold = drop_threshold(p)
    high = threshold >= 128
    numbers = {"drop_low": (threshold - 128 * high) * 0x01010101, "drop_high": high * 0x80808080}
    # Where nothing is kept the factor multiplies zeros alone.
    scale = keep_scale(p) or 1.0
    return {
        **{name: word - (word >> 31 << 32) for name, word in numbers.items()},  # as an int32
        "keep_scale": scale,
        "keep_share": 1 / scale,
    }


def _descale_numbers(optional: Mapping[str, Tensor | None]) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {}
    for name in ("descale_q", "descale_k", "descale_v"):
        strides = zip(("batch", "head"), descale_strides(optional[name]), strict=True)
        numbers |= {f"{name}_stride_{axis}": stride for axis, stride in strides}
    return numbers


def descale_strides(descale: Tensor | None) -> tuple[int, int]:
    """Elements from one sequence to the next and from one key/value head to the next."""
    if descale is None or descale.ndim == 1:
        return 0, 0
    batch, head = (
        stride if size > 1 else 0
        for size, stride in zip(descale.shape, descale.stride(), strict=True)
    )
    return batch, head
