"""The operation `attngen::forward_fp8`: dense 8-bit attention through compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ..reference.call import SCALES
from ..reference.fp8 import is_fp8
from ..reference.fp8_checks import dtype_violations, output_violations, scale_violations
from ..spec import dtype_name
from .operands import device_violations, memory_axes, outputs, scalars_of
from .operation import Operands, Operation, Output, Ready, find_ready, library, prepare_forward, run

OFFSET_LIMIT = 1 << 31  # elements; kernels index scales in 32 bits

library.define(
    "forward_fp8(Tensor q, Tensor k, Tensor v, str layout, str mask, float softmax_scale, "
    "int window_left, int window_right, bool bottom_right, ScalarType out_dtype, "
    "Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, Tensor? scale_s, Tensor? descale_s, "
    "Tensor? scale_o, bool amax) -> (Tensor, Tensor, Tensor, Tensor)"
)


def forward_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    out_dtype: torch.dtype,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    descale_v: Tensor | None,
    scale_s: Tensor | None,
    descale_s: Tensor | None,
    scale_o: Tensor | None,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of dense 8-bit tensors: output, log-sum-exp, and the maxima of S and O.

    q, k and v as `attngen::forward` takes them, but float8_e4m3fn or float8_e5m2, in k and v
    alike, with head dims that are multiples of 16. Scales: float32 [1] on the same device, or
    None for 1 (scale_s with descale_s: for the kernel's choice); descales of q, k and v may be
    [b, h_kv], too. Returns the output in Q's axis order and `out_dtype` (16 bits or 8, these
    times scale_o), the LSE as `attngen::forward` does, and two float32 [1], [0] without `amax`.
    Raises: SpecError with every violation; LaunchError.
    """
    operands = (q, k, v, descale_q, descale_k, descale_v, scale_s, descale_s, scale_o)
    arguments = (
        *(layout, mask, softmax_scale, window_left, window_right, bottom_right),
        *(out_dtype, amax),
    )
    out, lse, *maxima = run(find_ready(FORWARD_FP8, operands, arguments), operands)
    amax_s, amax_o = maxima or _new_maxima(q, amax)
    return out, lse, amax_s, amax_o


def _make_ready(operands: Operands, arguments: tuple[Any, ...]) -> Ready:
    q, k, v, *given = operands
    assert q is not None and k is not None and v is not None  # the operation's schema
    layout, mask, *numbers, out_dtype, amax = arguments
    scales = dict(zip(SCALES, given, strict=True))
    out, lse = outputs(q, v, layout, out_dtype)
    reasons = _violations(q, k, v, memory_axes(layout), out_dtype, scales)
    scalars = scalars_of(*numbers)
    if not reasons:
        descales = (scales["descale_q"], scales["descale_k"], scales["descale_v"])
        strides = tuple(descale_strides(descale) for descale in descales)
        scalars = dataclasses.replace(scalars, descale_strides=strides)
    prepared = prepare_forward(
        {"q": q, "k": k, "v": v, "o": out},
        layout,
        scalars,
        reasons,
        mask=mask,
        kv_dtype=dtype_name(k.dtype),
        out_dtype=dtype_name(out_dtype),
    )
    results = [Output.like("o", out, 0.0), Output.like("lse", lse, -math.inf)]
    maxima = dict(zip(("amax_s", "amax_o"), _new_maxima(q, amax), strict=True))
    if amax:
        results += [Output.like(name, x, 0.0, preset=True) for name, x in maxima.items()]
    unused = () if amax else tuple(maxima)
    return Ready(("q", "k", "v", *SCALES), tuple(results), unused, q.device, prepared)


def _violations(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axes: str,
    out_dtype: torch.dtype,
    scales: dict[str, Tensor | None],
) -> list[str]:
    """What is wrong with dtypes, scales and devices."""
    reasons = [*dtype_violations(q.dtype, k.dtype, v.dtype)]
    if not is_fp8(q.dtype):
        reasons.append(f"q is {q.dtype}; attngen::forward takes 16 bits")
    batch, heads_kv = (k.shape[axes.index(axis)] for axis in "bh")
    reasons += scale_violations(scales, batch, heads_kv)
    reasons += output_violations(out_dtype, scales["scale_o"])
    reasons += device_violations({"q": q, **scales})
    for name, scale in scales.items():
        if scale is not None and _last_offset(scale) >= OFFSET_LIMIT:
            reasons.append(f"{name}: strides {scale.stride()} reach beyond 2^31 elements")
    return reasons


def _last_offset(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps)


def descale_strides(descale: Tensor | None) -> tuple[int, int]:
    """Elements from one sequence to the next and from one key/value head to the next."""
    if descale is None or descale.ndim == 1:
        return 0, 0
    batch, head = (
        stride if size > 1 else 0
        for size, stride in zip(descale.shape, descale.stride(), strict=True)
    )
    return batch, head


def _new_maxima(q: Tensor, amax: bool) -> tuple[Tensor, Tensor]:
    """Two float32 [1], or [0] where nobody asks for them."""
    amax_s, amax_o = (q.new_empty(int(amax), dtype=torch.float32) for _ in range(2))
    return amax_s, amax_o


def _call(operands: Operands, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = torch.ops.attngen.forward_fp8(
        *operands[:3], *arguments[:-1], *operands[3:], arguments[-1]
    )
    return results


FORWARD_FP8 = Operation(_call, _make_ready)


def _fake_forward_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: str,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    out_dtype: torch.dtype,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    descale_v: Tensor | None,
    scale_s: Tensor | None,
    descale_s: Tensor | None,
    scale_o: Tensor | None,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*outputs(q, v, layout, out_dtype), *_new_maxima(q, amax))


library.impl("forward_fp8", forward_fp8, "CUDA")
torch.library.register_fake("attngen::forward_fp8", _fake_forward_fp8, lib=library)
