"""`fused_attn_fwd` and `fused_attn_bwd`: attention and its gradients, without autograd."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import attention, reference
from ...errors import AttngenError, LimitError, SpecError
from ...spec.layouts import Layout, size
from .arguments import taking
from .layouts import carrier_of, packed_like, parsed, separate, turned
from .names import AttnMaskType, FusedAttnBackend, QKVFormat
from .variants import (
    BIAS_TYPES,
    SideLengths,
    Tensors,
    Variant,
    batch_of,
    lengths_of,
    mask_of,
    refuse_fp8,
    variant_of,
)

log = logging.getLogger("attngen")


@dataclass(slots=True)
class ForwardArguments:
    """Arguments of `fused_attn_fwd`, in TransformerEngine's order."""

    is_training: bool
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    fake_dtype: torch.dtype
    fused_attention_backend: Any
    attn_bias: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    page_table_k: Tensor | None = None
    page_table_v: Tensor | None = None
    s_quantizer: Any = None
    o_quantizer: Any = None
    attn_scale: float | None = None
    dropout: float = 0.0
    fast_zero_fill: bool = True
    qkv_layout: str = "sbh3d"
    o_format: str = "sbhd"
    qkv_scale_inv_format: str | None = None
    attn_bias_type: str = "no_bias"
    attn_mask_type: str = "padding"
    softmax_type: str = "vanilla"
    window_size: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool | None = None
    rng_gen: torch.Generator | None = None
    softmax_offset: Tensor | None = None
    return_max_logit: bool = False
    cuda_graph: bool = False


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


Arguments = ForwardArguments | BackwardArguments


@taking(ForwardArguments)
def fused_attn_fwd(call: ForwardArguments) -> tuple[Any, ...]:
    """Attention, with what its backward needs; autograd sees nothing of it.

    q, k, v are three views in the formats of `qkv_layout`, of any strides; a bias has q's dtype and
    any broadcast of [b, h, s_q, s_kv]. Lengths, int32 [b + 1], are read where the layout is packed,
    the mask pads or keys lie in pages. max_seqlen_q and max_seqlen_kv, fake_dtype, fast_zero_fill
    and cuda_graph change nothing.

    Returns:
        (o, aux), or (o, aux, max_logit) with return_max_logit. o: in o_format, of packed tokens in
        thd, with V's head dim. aux: [stats, rng_state, (bias), (softmax_offset)]: the log-sum-exp,
        float32 [b, h, s_q, 1] or [t, h, 1]; int64 [2], zeros without dropout; and what the call
        has of the others. max_logit: [h], in o's dtype.

    Raises:
        ValueError: for FusedAttnBackend.No_Backend, a bias that is missing or of another dtype,
            8-bit arguments, and whatever `attngen.attention` refuses.
        KeyError: for a word that there is not.
    """
    _check(call, call.fused_attention_backend)
    refuse_fp8("quantizers", call.s_quantizer is not None or call.o_quantizer is not None)
    if call.attn_bias_type in BIAS_TYPES:
        _check_bias(call.attn_bias, call.q)
    tables = (call.page_table_k, call.page_table_v)
    layout = separate(call.qkv_layout)
    variant = replace(_variant_of(call, layout), dropout_p=call.dropout * call.is_training)
    tensors = _lengths_of(call, layout, call.page_table_k)
    offset = _offset_of(call)
    tensors["sink"] = None if offset is None else offset.reshape(-1).float()
    tensors["bias"] = call.attn_bias if call.attn_bias_type in BIAS_TYPES else None
    if variant.dropout_p > 0 and call.rng_gen is not None:
        tensors["rng_state"] = drawn(call.q.device, call.rng_gen)
    given: dict[str, Any] = {**variant.for_attention(), **tensors}
    given["page_table"] = None if call.page_table_k is None else tables
    given["alibi_slopes"] = call.attn_bias_type == "alibi" or None
    given["return_max_logit"] = call.return_max_logit
    with torch.no_grad():
        out, results = attention(call.q, call.k, call.v, **given, return_lse=True)
    q_format, _ = parsed(layout).formats
    rng_state = results.rng_state
    aux = [
        stats_of(results.lse, q_format),
        call.q.new_zeros(2, dtype=torch.int64) if rng_state is None else rng_state,
        *(x for x in (tensors["bias"], offset) if x is not None),
    ]
    out = turned(out, q_format, call.o_format if q_format != "thd" else q_format)
    if call.return_max_logit:
        return out, aux, results.max_logit.to(out.dtype)
    return out, aux


@taking(BackwardArguments)
def fused_attn_bwd(call: BackwardArguments) -> list[Tensor | None]:
    """Gradients of `fused_attn_fwd`, from its output, that one's gradient and aux tensors.

    Returns:
        [dq, dk, dv, dbias, dsoftmax_offset]. The first three are in the formats of dqkv_layout; of
        a packed one they are views of one buffer that holds all that it packs. dbias: as the bias;
        dsoftmax_offset: float32 [1, h, 1, 1]; None of what the call has not.

    Raises:
        ValueError: for FusedAttnBackend.No_Backend, too few aux tensors, 8-bit arguments, and
            whatever `attngen.attention` refuses.
        KeyError: for a word that there is not.
    """
    _check(call, call.fused_attention_backend)
    quantizers = (call.s_quantizer, call.dp_quantizer, call.dqkv_quantizer)
    refuse_fp8("quantizers", any(x is not None for x in quantizers))
    has_bias, has_offset = call.attn_bias_type in BIAS_TYPES, call.softmax_type != "vanilla"
    wanted = 2 + has_bias + has_offset
    if len(call.aux_ctx_tensors) != wanted:
        raise SpecError(
            f"aux_ctx_tensors needs {wanted} tensors, as fused_attn_fwd returns them with these "
            f"arguments; got {len(call.aux_ctx_tensors)}"
        )
    stats, rng_state, *more = call.aux_ctx_tensors
    layout = parsed(call.qkv_layout)
    whole = layout.packing != "none" and call.dqkv_layout == call.qkv_layout
    carrier = carrier_of(layout, _packed_parts(layout, call.q, call.k, call.v)) if whole else None
    name = call.qkv_layout if carrier is not None else separate(call.qkv_layout)
    variant = replace(_variant_of(call, name), dropout_p=call.dropout)
    tensors = _lengths_of(call, name)
    if call.attn_bias_type == "alibi":
        tensors["alibi_slopes"] = reference.default_alibi_slopes(_heads_of(call), call.q.device)
    if variant.dropout_p > 0:
        tensors["rng_state"] = rng_state
    tensors["bias"] = more.pop(0) if has_bias else None
    tensors["sink"] = more.pop(0).reshape(-1).float() if has_offset else None
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
    *of_carriers, dsink, dbias = found
    gradients = _gradients(call, carrier is not None, of_carriers)
    return [
        *gradients,
        dbias if has_bias else None,
        dsink.view(1, -1, 1, 1) if has_offset else None,
    ]


def drawn(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A seed and an offset of dropout, int64 [2], of a generator of this device."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


def stats_of(lse: Tensor, axes: str) -> Tensor:
    """The log-sum-exp with TransformerEngine's shape, [b, h, s, 1] or [t, h, 1]; a view."""
    return (lse.t() if axes == "thd" else lse).unsqueeze(-1)


def lse_of(stats: Tensor, axes: str) -> Tensor:
    """The log-sum-exp [b, h, s] or [h, t] of TransformerEngine's stats; a view."""
    lse = stats.squeeze(-1)
    return lse.t() if axes == "thd" else lse


def _check(call: Arguments, backend: Any) -> None:
    """Raises: ValueError for a backend that computes nothing, or is not there."""
    backend = FusedAttnBackend.cast(backend)
    if backend == FusedAttnBackend.No_Backend:
        raise SpecError(
            f"no fused attention for qkv_layout={call.qkv_layout!r}, "
            f"attn_bias_type={call.attn_bias_type!r}, attn_mask_type={call.attn_mask_type!r}, "
            f"q.shape={list(call.q.shape)}, q.dtype={call.q.dtype}: the backend is No_Backend. "
            "get_fused_attn_backend says why with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"
        )
    refuse_fp8("FusedAttnBackend.FP8", backend == FusedAttnBackend.FP8)
    QKVFormat[call.o_format]


def _check_bias(bias: Tensor | None, q: Tensor) -> None:
    if bias is None:
        raise SpecError("attn_bias is None, and attn_bias_type asks for one")
    if bias.dtype != q.dtype:
        raise SpecError(f"attn_bias needs q's dtype, {q.dtype}; got {bias.dtype}")


def _variant_of(call: Arguments, layout: str) -> Variant:
    AttnMaskType[mask_of(call.attn_mask_type)]  # arbitrary masks have no number, and no argument
    variant = variant_of(
        layout,
        call.attn_mask_type,
        call.window_size,
        call.bottom_right_diagonal,
        call.softmax_type,
        call.attn_bias_type,
    )
    return replace(variant, softmax_scale=call.attn_scale)


def _lengths_of(call: Arguments, layout: str, page_table: Tensor | None = None) -> Tensors:
    return lengths_of(
        layout,
        "padding" in call.attn_mask_type,
        batch_of(layout, call.q, call.k, page_table),
        SideLengths(call.cu_seqlens_q, call.cu_seqlens_q_padded),
        SideLengths(call.cu_seqlens_kv, call.cu_seqlens_kv_padded),
    )


def _offset_of(call: ForwardArguments) -> Tensor | None:
    """The sinks that a call has; zeros of an off-by-one softmax that names none."""
    if call.softmax_type == "vanilla":
        return None
    if call.softmax_offset is not None:
        return call.softmax_offset
    if call.softmax_type == "learnable":
        raise SpecError("softmax_offset is None, and softmax_type='learnable' needs one")
    return call.q.new_zeros((1, _heads_of(call), 1, 1), dtype=torch.float32)


def _heads_of(call: Arguments) -> int:
    axes = parsed(call.qkv_layout).q_format
    return size(call.q.shape, axes, "h")


def _packed_parts(layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (q, k, v) if layout.one_length else (k, v)


def _differentiated(
    variant: Variant,
    tensors: Tensors,
    operands: tuple[Tensor, tuple[Tensor | None, ...], Tensor, Tensor],
    deterministic: bool,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, sink and bias, by the kernels, or by the definition where these refuse,
    which is logged once. operands: dO, the carriers, O and the log-sum-exp."""
    d_o, carriers, o, lse = operands
    words = variant.for_operation()
    try:
        return tuple(
            torch.ops.attngen.backward(
                d_o, None, *carriers, o, lse, **tensors, **words, deterministic=deterministic
            )
        )
    except (SpecError, LimitError, NotImplementedError) as error:  # the last, of the dispatcher
        refusal = f"{d_o.device} has no kernels"
        if isinstance(error, AttngenError):
            refusal = "; ".join(error.reasons)
    _log_once(refusal)
    dq, dk, dv, _, dsink, dbias, *_ = torch.ops.attngen.reference_backward(
        d_o, None, *carriers, **tensors, **words, want_alibi_slopes=False
    )
    return dq, dk, dv, dsink, dbias


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
