"""Whether the scales and output of a call belong to its dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..call.fp8_checks import (
    CACHE_SCALES,
    ScaledSizes,
    TokenAxis,
    output_violations,
    scale_violations,
)
from ..call.table import AttentionCall
from ..spec.layouts import size
from . import fp8
from .operands import Operands
from .sizes import agree
from .wording import names

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NAMED_PLACES = 4  # of a tensor's scales, of which there may be one a token
OUT_DTYPES = (torch.float16, torch.bfloat16, *fp8.DTYPES)


def fp8_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Find what does not fit an FP8 call, and arguments of FP8 alone that other calls have."""
    cached = fp8.is_fp8(operands.k.dtype)
    if not fp8.is_fp8(operands.q.dtype):
        yield from _misplaced(call, operands.q.dtype, CACHE_SCALES if cached else ())
    else:
        scaled = call.scale_o is not None
        yield from output_violations(fp8.output_dtype(call), scaled, OUT_DTYPES, fp8.DTYPES)
    if not cached:
        return
    sizes = ScaledSizes(operands.batch, operands.h_kv, operands.h_q)
    if fp8.is_fp8(operands.q.dtype) and not operands.layout.paged:
        sizes = sizes._replace(of_q=_tokens(operands, "q"), of_kv=_tokens(operands, "kv"))
    yield from scale_violations(call.scales, sizes, agree=agree)
    given = (operands.q, operands.k, operands.v, *call.scales.values(), call.bias, call.sink)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
        yield (
            "FP8 k and v have no backward here; got tensors that require a gradient. Call it "
            "under torch.no_grad(), or reference.fp8_backward for gradients."
        )


def _tokens(operands: Operands, side: str) -> TokenAxis:
    """The tokens of Q, or of K, that have scales."""
    x, fmt = operands.q, operands.layout.q_format
    if side == "kv":
        x, fmt = operands.k, operands.layout.kv_format
    if fmt == "thd":
        return TokenAxis(1, size(x.shape, fmt, "t"), packed=True)
    return TokenAxis(operands.batch, size(x.shape, fmt, "s"))


def scale_values(scales: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Scales that are negative, infinite or NaN, each by its place; waits for their device."""
    for name, scale in scales.items():
        if scale is None:
            continue
        wrong = ~((scale >= 0) & (scale < float("inf")))
        places = wrong.nonzero().tolist()
        others = len(places) - NAMED_PLACES
        more = f" So are {others} other places." if others > 0 else ""
        for place in places[:NAMED_PLACES]:
            value = scale[tuple(place)].item()
            yield (
                f"{name}{place}={value:g}: scales are finite, and not negative. Look at its amax."
                f"{more}"
            )


def _misplaced(call: AttentionCall, q: torch.dtype, fitting: tuple[str, ...]) -> Iterator[str]:
    """FP8's arguments in a call whose Q has 16 bits and more, but for scales that fit it."""
    dtype = names([q])
    for name, scale in call.scales.items():
        if scale is not None and name not in fitting:
            yield (
                f"{name} belongs to FP8 q, k and v; q is {dtype}, whose numbers stand for "
                f"themselves. Leave it out."
            )
    if call.out_dtype not in (None, q) and not (
        call.out_dtype == torch.float32 and q in (torch.float16, torch.bfloat16)
    ):
        yield (
            f"out_dtype: q is {dtype}, and so is the output, or float32 beside 16 bits; got "
            f"{call.out_dtype!r}. Leave it out and cast the output."
        )
    if call.return_amax:
        yield (
            f"return_amax finds the next scales of FP8 tensors; q is {dtype}, which has none. "
            f"Leave it out."
        )
