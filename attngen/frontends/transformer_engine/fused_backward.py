"""`fused_attn_bwd`: the gradients of `fused_attn_fwd`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...call.table import CARRIERS, DIFFERENTIABLE, GRADIENT_OF
from ...errors import AttngenError, LimitError, SpecError
from ...spec.layouts import Layout
from .arguments import taking
from .eight_bits import is_stored, wrapped
from .fused_backward_fp8 import differentiated
from .fused_shared import check, heads_of, lengths_of, lse_of, words_of
from .layouts import carrier_of, packed_like, parsed, separate, turned
from .variants import BIAS_TYPES, Tensors, Variant, as_sink

log = logging.getLogger("attngen")


@dataclass(slots=True)
class BackwardArguments:
    """Arguments of `fused_attn_bwd`, in TransformerEngine's order."""

    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    d_o: Tensor
    fake_dtype: torch.dtype
    aux_ctx_tensors: list[Tensor]
    fused_attention_backend: Any
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    s_quantizer: Any = None
    dp_quantizer: Any = None
    dqkv_quantizer: Any = None
    attn_scale: float | None = None
    dropout: float = 0.0
    fast_zero_fill: bool = True
    qkv_layout: str = "sbh3d"
    o_format: str = "sbhd"
    do_format: str = "sbhd"
    dqkv_layout: str = "sbh3d"
    qkv_scale_inv_format: str | None = None
    do_scale_inv_format: str | None = None
    attn_bias_type: str = "no_bias"
    attn_mask_type: str = "padding"
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool | None = None
    deterministic: bool = False
    cuda_graph: bool = False


@taking(BackwardArguments)
def fused_attn_bwd(call: BackwardArguments) -> list[Tensor | None]:
    """Gradients of `fused_attn_fwd`, from its output, that one's gradient and aux tensors.

    Those of FP8 tensors are made in 8 bits, d_o in FP8 too, with the scales of s_quantizer, the
    forward's, and dp_quantizer; they are in FP8 where dqkv_quantizer's scale is known before, else
    in fake_dtype. Both quantizers learn their maxima.

    Returns:
        [dq, dk, dv, dbias, dsoftmax_offset]. The first three are in the formats of dqkv_layout; of
        a packed one they are views of one buffer that holds all that it packs. dbias: as the bias;
        dsoftmax_offset: float32 [1, h, 1, 1]; None of what the call has not.

    Raises:
        ValueError: for FusedAttnBackend.No_Backend, too few aux tensors, quantizers beside tensors
            in 16 bits, and whatever `attngen.attention` refuses.
        KeyError: for a word that there is not.
    """
    check(call, call.s_quantizer, call.dp_quantizer, call.dqkv_quantizer)
    in_8_bits = is_stored(call.q)
    has_bias, has_offset = call.attn_bias_type in BIAS_TYPES, call.softmax_type != "vanilla"
    wanted = 2 + has_bias + has_offset
    if len(call.aux_ctx_tensors) != wanted:
        raise SpecError(
            f"aux_ctx_tensors needs {wanted} tensors, as fused_attn_fwd returns them with these "
            f"arguments; got {len(call.aux_ctx_tensors)}"
        )
    stats, rng_state, *more = call.aux_ctx_tensors
    layout = parsed(call.qkv_layout)
    whole = layout.packing != "none" and call.dqkv_layout == call.qkv_layout and not in_8_bits
    carrier = carrier_of(layout, _packed_parts(layout, call.q, call.k, call.v)) if whole else None
    name = call.qkv_layout if carrier is not None else separate(call.qkv_layout)
    variant = replace(words_of(call, name), dropout_p=call.dropout)
    tensors: Tensors = {x.argument: x.of(getattr(call, x.source)) for x in lengths_of(call, name)}
    if call.attn_bias_type == "alibi":
        tensors["alibi_slopes"] = reference.default_alibi_slopes(heads_of(call), call.q.device)
    if variant.dropout_p > 0:
        tensors["rng_state"] = rng_state
    tensors["bias"] = more.pop(0) if has_bias else None
    tensors["sink"] = as_sink(more.pop(0)) if has_offset else None
    if in_8_bits:
        return _of_stored(call, variant, tensors, lse_of(stats, layout.q_format))
    given: tuple[Tensor | None, ...] = (call.q, call.k, call.v)
    if carrier is not None:
        given = (carrier, None, None) if layout.one_length else (call.q, carrier, None)
    axes = layout.q_format
    formats = (axes, axes) if axes == "thd" else (call.o_format, call.do_format)
    o, d_o = (turned(x, f, axes) for x, f in zip((call.o, call.d_o), formats, strict=True))
    with torch.no_grad():
        found = _differentiated(
            variant, tensors, (d_o, given, o, lse_of(stats, axes)), call.deterministic
        )
    gradients = _gradients(call, carrier is not None, [found[name] for name in CARRIERS])
    return [
        *gradients,
        found["bias"] if has_bias else None,
        found["sink"].view(1, -1, 1, 1) if has_offset else None,
    ]


def _of_stored(
    call: BackwardArguments, variant: Variant, tensors: Tensors, lse: Tensor
) -> list[Tensor | None]:
    """The gradients of a call of FP8 tensors."""
    with torch.no_grad():
        found, refusal = differentiated(call, variant, tensors, lse)
    if refusal is not None:
        _log_once(refusal)
    gradients = _gradients(call, False, [found[name] for name in ("dq", "dk", "dv")])
    return [
        *[wrapped(call.dqkv_quantizer, x, call.fake_dtype) for x in gradients],
        found["dbias"] if tensors["bias"] is not None else None,
        found["dsink"].view(1, -1, 1, 1) if tensors["sink"] is not None else None,
    ]


def _packed_parts(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (q, k, v) if layout.one_length else (k, v)


def _differentiated(
    variant: Variant,
    tensors: Tensors,
    operands: tuple[Tensor, tuple[Tensor | None, ...], Tensor, Tensor],
    deterministic: bool,
) -> dict[str, Tensor]:
    """Gradients by their operands' names, from the kernels, or from the definition where these
    refuse, which is logged once. operands: dO, the carriers, O and the log-sum-exp."""
    d_o, carriers, o, lse = operands
    words = variant.for_operation()
    try:
        found = torch.ops.attngen.backward(
            d_o, None, *carriers, o, lse, **tensors, **words, deterministic=deterministic
        )
        return dict(zip(GRADIENT_OF, found, strict=True))
    except (SpecError, LimitError, NotImplementedError) as error:  # the last, of the dispatcher
        refusal = f"{d_o.device} has no kernels"
        if isinstance(error, AttngenError):
            refusal = "; ".join(error.reasons)
    _log_once(refusal)
    found = torch.ops.attngen.reference_backward(
        d_o, None, *carriers, **tensors, **words, want_alibi_slopes=False
    )
    return dict(zip(DIFFERENTIABLE, found, strict=True))


def _gradients(call: BackwardArguments, whole: bool, found: list[Tensor]) -> list[Tensor]:
    """dQ, dK and dV in the formats of `dqkv_layout`. whole: whether packed ones were found so."""
    layout, target = parsed(call.qkv_layout), parsed(call.dqkv_layout)
    if whole:
        dq, dk, _ = found
        _, axis, _ = layout.home(*layout.packed_operands[:1])
        return [*dq.unbind(axis)] if layout.one_length else [dq, *dk.unbind(axis)]
    dq, dk, dv = found
    dq = turned(dq, layout.q_format, target.q_format)
    dk, dv = (turned(x, layout.kv_format, target.kv_format) for x in (dk, dv))
    if target.packing == "none":
        return [dq, dk, dv]
    if target.one_length:
        return [*packed_like(target, (dq, dk, dv))]
    return [dq, *packed_like(target, (dk, dv))]


_logged: set[str] = set()


def _log_once(reason: str) -> None:
    if reason not in _logged:
        _logged.add(reason)
        log.warning("attention's gradients run on the reference backend: %s", reason)
