"""Whether the dtypes, scales and output of a call belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..call.table import AttentionCall
from . import fp8
from .operands import Operands
from .sizes import agree_all
from .wording import names, shape_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BESIDE_CACHE = (torch.float16, torch.bfloat16)
CACHE_SCALES = ("descale_k", "descale_v")
OUT_DTYPES = (torch.float16, torch.bfloat16, *fp8.DTYPES)


def dtype_violations(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> Iterator[str]:
    """Q, K and V have one floating dtype, or K and V one of the FP8 formats and Q one of them or
    16 bits."""
    together = fp8.DTYPES if fp8.is_fp8(q) else (q, *fp8.DTYPES) if q in BESIDE_CACHE else (q,)
    if q not in (*FLOATS, *fp8.DTYPES) or k not in together or k != v:
        yield (
            f"q, k and v need one dtype of {names(FLOATS)}, {names(fp8.DTYPES)}; FP8 in k and v "
            f"alike may also stand beside a q of the other FP8 format, or of "
            f"{names(BESIDE_CACHE, ' or ')}; got {names((q, k, v))}. Cast them."
        )


def fp8_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Find what does not fit an FP8 call, and arguments of FP8 alone that other calls have."""
    cached = fp8.is_fp8(operands.k.dtype)
    if not fp8.is_fp8(operands.q.dtype):
        yield from _misplaced(call, operands.q.dtype, CACHE_SCALES if cached else ())
    else:
        yield from output_violations(fp8.output_dtype(call), call.scale_o)
    if not cached:
        return
    yield from scale_violations(call.scales, operands.batch, operands.h_kv)
    given = (operands.q, operands.k, operands.v, *call.scales.values(), call.bias, call.sink)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
        yield (
            "FP8 k and v have no backward yet; got tensors that require a gradient. Call it "
            "under torch.no_grad(), or detach them."
        )


def scale_violations(
    scales: Mapping[str, Tensor | None],
    b: int,
    h_kv: int,
    floats: Sequence[torch.dtype] = FLOATS,
) -> Iterator[str]:
    """Shapes and dtypes of the scales, by their names; S has both of its scales or neither.
    floats: the dtypes that they may have."""
    for name, scale in scales.items():
        per_head = name in ("descale_q", "descale_k", "descale_v")
        if scale is not None and not _fits(scale, floats, (1,), *[(b, h_kv)] * per_head):
            wanted = f"float32 [1] or [b={b}, h_kv={h_kv}]" if per_head else "float32 [1]"
            yield f"{name} needs {wanted}; got {shape_of(scale)}. Pass a tensor on q's device."
    if (scales["scale_s"] is None) != (scales["descale_s"] is None):
        given = "scale_s" if scales["descale_s"] is None else "descale_s"
        yield (
            f"scale_s and descale_s belong together, each the other's reciprocal; got {given} "
            f"alone. Pass both, or neither for a power of two."
        )


def output_violations(out_dtype: torch.dtype, scale_o: Tensor | None) -> Iterator[str]:
    """The dtype of the output of an FP8 call, and its scale."""
    if out_dtype not in OUT_DTYPES:
        yield (
            f"out_dtype beside FP8 q, k and v needs one of {names(OUT_DTYPES)}, or None for "
            f"bfloat16; got {out_dtype!r}. Pass one."
        )
    elif scale_o is not None and not fp8.is_fp8(out_dtype):
        yield (
            f"scale_o scales an FP8 output; got it with out_dtype={names([out_dtype])}. Leave it "
            f"out, or pass an FP8 out_dtype."
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


def _fits(x: object, floats: Sequence[torch.dtype], *shapes: tuple[int, ...]) -> bool:
    if not isinstance(x, Tensor) or x.dtype not in floats:
        return False
    return any(agree_all(x.shape, shape) for shape in shapes)
