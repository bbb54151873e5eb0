"""Operands of the torch operations: their sizes, the outputs' shapes, and what a launch is told."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import SpecError
from ..layouts import parse
from ..reference.fp8 import is_fp8
from ..run_time import UNBOUNDED, Extent, Scalars
from ..spec import AttentionSpec, dtype_name
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    optional: Mapping[str, Tensor | None],
    arguments: Arguments,
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
        alibi=optional["alibi_slopes"] is not None,
        softcap=arguments.softcap != 0,
        softmax=arguments.softmax,
        return_max_logit=arguments.max_logit,
    )


def softmax_scale_of(q: Tensor, arguments: Arguments) -> float:
    """The factor of the scores, 1/√d where a call names none."""
    scale = arguments.softmax_scale
    return float(q.shape[-1]) ** -0.5 if scale is None and q.shape[-1] else scale or 0.0


def scalars_of(
    q: Tensor, optional: Mapping[str, Tensor | None], arguments: Arguments
) -> Scalars:
    """The run-time values of a call; a window side of −1, or too long to end, is unbounded."""
    sides = (arguments.window_left, arguments.window_right)
    left, right = (side if 0 <= side < UNBOUNDED else UNBOUNDED for side in sides)
    scale, aligned = softmax_scale_of(q, arguments), arguments.bottom_right
    numbers = _stride_numbers(optional)
    if arguments.softcap:
        numbers |= {"softcap": arguments.softcap, "softcap_inverse": 1 / arguments.softcap}
    return Scalars(scale, left, right, aligned, numbers)


def _stride_numbers(optional: Mapping[str, Tensor | None]) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {}
    for name in ("descale_q", "descale_k", "descale_v", "alibi_slopes", "sink"):
        strides = zip(("batch", "head"), head_strides(optional[name]), strict=True)
        numbers |= {f"{name}_stride_{axis}": stride for axis, stride in strides}
    return numbers


def head_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Elements from one sequence to the next and from one head to the next, of a tensor [h] or
    [b, h]; 0 over a single one."""
    if tensor is None:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride if size > 1 else 0 for size, stride in steps]
    batch, head = strides if len(strides) == 2 else (0, *strides)
    return batch, head
