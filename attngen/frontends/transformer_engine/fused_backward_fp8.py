"""Gradients of `fused_attn_fwd` of FP8 tensors, made in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...call.fp8_checks import BACKWARD_SCALES
from ...call.fp8_gradients import MAXIMA
from ...call.table import GRADIENT_OF
from ...call.tensors import name_of
from ...errors import SpecError
from .eight_bits import (
    Stored,
    descales,
    note,
    read,
    result_dtype,
    stored_of,
    stores,
    torch_dtype,
    weights_scales,
)
from .layouts import parsed, turned
from .variants import Tensors, Variant


def differentiated(
    call: Any, variant: Variant, tensors: Tensors, lse: Tensor
) -> tuple[dict[str, Tensor], str | None]:
    """Gradients of q, k, v, sink and bias, by their names, by the kernels, or by the definition
    where these refuse, and then why. call: arguments of `fused_attn_bwd`.

    The maxima of dP and of the gradients are noted in their quantizers. Raises: SpecError.
    """
    operands, scales, o, d_o = _read(call)
    words: dict[str, Any] = variant.for_operation() | {
        "out_dtype": name_of(result_dtype(call.dqkv_quantizer, call.fake_dtype)),
        "amax": True,
        "deterministic": call.deterministic,
    }
    words |= {**tensors, **descales(operands), **weights_scales(call.s_quantizer)}
    q, k, v = (x.data for x in operands.values())
    backward, refusal = torch.ops.attngen.fp8_backward, None
    try:
        results = backward(d_o, None, q, k, v, o, lse, **words, **scales)
    except (SpecError, NotImplementedError) as error:  # the last, of the dispatcher
        refusal = f"{d_o.device} has no kernels"
        if isinstance(error, SpecError):
            refusal = "; ".join(error.reasons)
        numbers = [scales.get(name) for name in BACKWARD_SCALES]
        definition = torch.ops.attngen.reference_fp8_backward
        results = definition(d_o, None, o, lse, *numbers, q, k, v, **words)
    found = dict(zip((*GRADIENT_OF.values(), *MAXIMA), results, strict=True))
    note(call.dp_quantizer, found["amax_dp"])
    note(call.dqkv_quantizer, found["amax_dq"], found["amax_dk"], found["amax_dv"])
    return found, refusal


def _read(call: Any) -> tuple[dict[str, Stored], dict[str, Tensor | None], Tensor, Tensor]:
    """Q, K and V, the scales of the backward alone by attngen's names, O and dO in Q's format.

    Raises: SpecError with every reason why they do not fit.
    """
    operands = read(("q", "k", "v"), (call.q, call.k, call.v))
    d_o = read(("d_o",), (call.d_o,))["d_o"]
    if call.dp_quantizer is None:
        raise SpecError("dp_quantizer is None: gradients in 8 bits need the scale of dP")
    if (dtype := torch_dtype(call.dp_quantizer.dtype)) != d_o.data.dtype:
        raise SpecError(f"dp_quantizer.dtype is {dtype}; dP has d_o's, {d_o.data.dtype}")
    o = stored_of(call.o) or Stored(call.o, None)
    scale_dp = call.dp_quantizer.scale.reshape(1)
    scales: dict[str, Tensor | None] = {
        **{"descale_o": o.descale, "descale_do": d_o.descale},
        **{"scale_dp": scale_dp, "descale_dp": scale_dp.reciprocal()},
    }
    if stores(call.dqkv_quantizer):
        scale = call.dqkv_quantizer.scale.reshape(1)
        scales |= dict.fromkeys(("scale_dq", "scale_dk", "scale_dv"), scale)
    axes = parsed(call.qkv_layout).q_format
    formats = (axes, axes) if axes == "thd" else (call.o_format, call.do_format)
    of_o, of_d_o = formats
    return operands, scales, turned(o.data, of_o, axes), turned(d_o.data, of_d_o, axes)
