"""`FusedAttnFunc` in FP8: what is stored by which quantizer, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import fp8
from .eight_bits import is_stored, read, stored_of
from .environment import FP8_BACKWARD, enabled
from .fused_backward import fused_attn_bwd
from .fused_forward import fused_attn_fwd
from .layouts import packed_like, parsed
from .names import META_DO, META_DP, META_DQKV, META_O, META_QKV, META_S, FusedAttnBackend

NAMES = ("q", "k", "v")


class Quantizers(NamedTuple):
    """Quantizers of a call, of which there are nine of a forward and six of a backward."""

    qkv: Any
    o: Any
    s: Any
    dqkv: Any
    d_o: Any
    dp: Any

    @classmethod
    def of(cls, given: Any) -> Quantizers:
        """Quantizers in the slots of a call's, by scaling_fwd and scaling_bwd."""
        forward, backward = given["scaling_fwd"], given["scaling_bwd"]
        return cls(
            *(forward[META_QKV], forward[META_O], forward[META_S]),
            *(backward[META_DQKV], backward[META_DO], backward[META_DP]),
        )


def forward(ctx: Any, call: Any, ends: dict[str, Any]) -> tuple[Any, ...]:
    """The output, and with return_max_logit the largest logits. call: `FunctionArguments`; ends:
    its cumulative lengths. The output is an FP8 tensor where fp8_output asks for one."""
    quantizers = Quantizers.of(call.quantizers)
    tensors: tuple[Tensor, ...] = (call.q, call.k, call.v)
    ctx.stored = is_stored(call.q)
    if not ctx.stored:
        tensors = stored_together(quantizers.qkv, tensors)
    shared = call.shared() | {"fused_attention_backend": FusedAttnBackend.FP8}
    operands: dict[str, Any] = dict(zip(NAMES, tensors, strict=True))
    out, aux, *more = fused_attn_fwd(
        is_training=call.is_training,
        **operands,
        s_quantizer=quantizers.s,
        o_quantizer=quantizers.o,
        softmax_offset=call.softmax_offset,
        rng_gen=call.rng_gen,
        return_max_logit=call.return_max_logit,
        **ends,
        **shared,
    )
    kept = read((*NAMES, "o"), tensors + (out,)) if is_stored(out) else read(NAMES, tensors)
    parts = [x for each in kept.values() for x in each]
    ctx.save_for_backward(*parts, *([] if is_stored(out) else [out]), *ends.values(), *aux)
    ctx.counts = len(kept), len(ends)
    ctx.quantizers, ctx.ends = quantizers, tuple(ends)
    ctx.shared = shared | {"deterministic": call.deterministic}
    ctx.bf16_backward = call.bf16_backward
    if call.fp8_output and not is_stored(out):
        out = quantizers.o(out)
    elif is_stored(out) and not call.fp8_output:
        out = wide(out, call.q.dtype)
    return (out, *more)


def backward(ctx: Any, d_out: Tensor) -> dict[str, Any]:
    """Gradients of q, k, v and of the sinks, by their names: made in 8 bits, or, where
    NVTE_FP8_DPA_BWD is 0, in 16, of what stored numbers stand for."""
    count, _ = ctx.counts
    stored, rest = ctx.saved_tensors[: 2 * count], [*ctx.saved_tensors[2 * count :]]
    nominal, layout = ctx.shared["fake_dtype"], ctx.shared["qkv_layout"]
    pairs = zip(stored[::2], stored[1::2], strict=True)
    tensors: list[Any] = [_tensor(*pair, nominal) for pair in pairs]
    if count == len(NAMES):
        tensors.append(rest.pop(0))
    given: dict[str, Any] = dict(zip((*NAMES, "o"), tensors, strict=True))
    ends: dict[str, Any] = dict(zip(ctx.ends, rest, strict=False))
    aux = rest[len(ctx.ends) :]
    quantizers, shared = ctx.quantizers, ctx.shared
    if enabled(FP8_BACKWARD):
        given["d_o"] = d_out if is_stored(d_out) else quantizers.d_o(d_out)
        made: dict[str, Any] = {
            f"{name}_quantizer": getattr(quantizers, name) for name in ("s", "dp", "dqkv")
        }
        if ctx.bf16_backward:
            made["dqkv_quantizer"] = None
    else:
        given = {name: wide(x, nominal) for name, x in {**given, "d_o": d_out}.items()}
        shared = shared | {"fused_attention_backend": FusedAttnBackend.F16_arbitrary_seqlen}
        made = {}
    dq, dk, dv, _, doffset = fused_attn_bwd(
        **given,
        aux_ctx_tensors=aux,
        do_format=shared["o_format"],
        dqkv_layout=layout,
        **made,
        **ends,
        **shared,
    )
    of_qkv: tuple[Any, ...] = (dq, dk, dv)
    if not ctx.stored:
        of_qkv = _packed(layout, *[wide(x, nominal) for x in of_qkv])
    return {**dict(zip(NAMES, of_qkv, strict=True)), "softmax_offset": doffset}


def stored_together(quantizer: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """FP8 tensors of one scale, which all of these decide where it is not known before."""
    joined = quantizer(torch.cat([x.detach().flatten() for x in tensors]))
    found = read(("q",), (joined,))["q"]
    parts = found.data.split([x.numel() for x in tensors])
    return tuple(
        _tensor(part.view(x.shape), found.descale, x.dtype)
        for part, x in zip(parts, tensors, strict=True)
    )


def _packed(name: str, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    """Gradients as views of one buffer where the layout packs what they are of."""
    layout = parsed(name)
    if layout.packing == "none":
        return dq, dk, dv
    if layout.one_length:
        return packed_like(layout, (dq, dk, dv))
    return dq, *packed_like(layout, (dk, dv))


def wide(x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor in 16 bits or more."""
    found = stored_of(x)
    if found is None:
        return x  # type: ignore[no-any-return]
    numbers = found.data.float()
    return (numbers if found.descale is None else numbers * found.descale).to(dtype)


def _tensor(data: Tensor, descale: Tensor | None, nominal: torch.dtype) -> Tensor:
    return data if descale is None else fp8.Float8Tensor(data, descale, nominal)
