"""Whether the operands of an FP8 backward belong to its forward, and to each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.fp8_checks import BACKWARD_SCALES, STORED_SCALES
from ..call.table import AttentionCall
from ..errors import SpecError
from . import fp8
from .fp8_backward_tensors import BackwardOperands
from .fp8_checks import FLOATS
from .operands import Operands
from .sizes import agree_all
from .wording import names, shape_of

WIDE = (torch.float32, torch.float64)


def check_backward(call: AttentionCall, operands: Operands, given: BackwardOperands) -> None:
    """Refuse operands that cannot be those of the backward of this call; reads no values.

    Raises: SpecError with every violation at once.
    """
    reasons = [
        *_forward_violations(call, operands, given.d_o),
        *_tensor_violations(call, operands, given),
        *scale_violations(given),
        *_device_violations(call, given),
    ]
    if reasons:
        raise SpecError(reasons)


def _forward_violations(
    call: AttentionCall, operands: Operands, d_o: Tensor
) -> Iterator[str]:
    q = operands.q.dtype
    if not fp8.is_fp8(q):
        yield f"q needs an FP8 dtype, {names(fp8.DTYPES)}; got {names([q])}. Quantise it."
    if operands.layout.paged:
        yield f"layout={operands.layout.name!r} is inference only. Gather the pages."
    if fp8.is_per_token(call.descale_q) and fp8.is_fp8(d_o.dtype):
        yield (
            "scales a token and head have gradients in 16 bits alone, sums over tokens leave no "
            "token's scale behind them. Pass d_o in 16 bits."
        )
    if call.functions:
        yield f"{', '.join(call.functions)}: functions have no FP8 backward. Use fragments."
    if call.dropout_p > 0 and call.rng_state is None:
        yield "dropout needs the rng_state of the forward; got None. Pass aux.rng_state."


def _tensor_violations(
    call: AttentionCall, operands: Operands, given: BackwardOperands
) -> Iterator[str]:
    """Shapes and dtypes of results of the forward, and of their gradients."""
    shape = (*operands.q.shape[:-1], operands.v.shape[-1])
    for name, x in (("d_o", given.d_o), ("o", given.o)):
        if not _fits(x, (*FLOATS, *fp8.DTYPES), shape):
            yield (
                f"{name} needs FP8 or floats, {list(shape)}; got {shape_of(x)}. Pass it as the "
                "forward returned the output."
            )
    axes = operands.layout.q_format
    rows = tuple(
        [operands.q.shape[axes.index(axis)] for axis in ("ht" if axes == "thd" else "bhs")]
    )
    if not _fits(given.lse, WIDE, rows):
        yield f"lse needs float32 {list(rows)}; got {shape_of(given.lse)}. Pass the forward's."
    if given.dlse is not None and not _fits(given.dlse, FLOATS, rows):
        yield f"dlse needs float32 {list(rows)}; got {shape_of(given.dlse)}. Pass lse's gradient."
    if given.dtype not in (*FLOATS, *fp8.DTYPES):
        yield (
            f"gradients need one of {names((*FLOATS, *fp8.DTYPES))}; got {given.dtype!r}. Pass one."
        )


def scale_violations(given: BackwardOperands) -> Iterator[str]:
    """Shapes, dtypes and pairs of the scales."""
    for name in BACKWARD_SCALES:
        scale = getattr(given, name)
        if scale is not None and not _fits(scale, FLOATS, (1,)):
            yield f"{name} needs float32 [1]; got {shape_of(scale)}. Pass a tensor on q's device."
    if (given.scale_dp is None) != (given.descale_dp is None):
        alone = "scale_dp" if given.descale_dp is None else "descale_dp"
        yield (
            f"scale_dp and descale_dp belong together, each the other's reciprocal; got {alone} "
            "alone. Pass both, or neither for a power of two."
        )
    d_o = _dtype_of(given.d_o)
    stored = {
        "descale_o": _dtype_of(given.o),
        **dict.fromkeys(("descale_do", "scale_dp", "descale_dp"), d_o),
        **dict.fromkeys(STORED_SCALES, given.dtype),
    }
    for name, dtype in stored.items():
        if getattr(given, name) is not None and dtype not in fp8.DTYPES:
            whose = {"descale_o": "o", **dict.fromkeys(STORED_SCALES, "gradients")}
            yield (
                f"{name} belongs to FP8 {whose.get(name, 'd_o')}; got {dtype}. Leave it out, or "
                "quantise."
            )


def _device_violations(call: AttentionCall, given: BackwardOperands) -> Iterator[str]:
    for name in ("d_o", "o", "lse", "dlse", *BACKWARD_SCALES):
        x = getattr(given, name)
        if isinstance(x, Tensor) and x.device != call.q.device:
            yield f"{name} needs q's device, {call.q.device}; got {x.device}. Move it there."


def _dtype_of(x: object) -> torch.dtype | None:
    return x.dtype if isinstance(x, Tensor) else None


def _fits(x: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> bool:
    return isinstance(x, Tensor) and x.dtype in dtypes and agree_all(x.shape, shape)
