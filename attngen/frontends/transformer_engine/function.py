"""`FusedAttnFunc`: the function of autograd around the fused functions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from . import function_fp8
from .fused_backward import fused_attn_bwd
from .fused_forward import fused_attn_fwd
from .layouts import carrier_of, parsed


@dataclass(slots=True)
class FunctionArguments:
    """Arguments of `FusedAttnFunc.apply`, by position."""

    is_training: bool
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    page_table_k: Tensor | None
    page_table_v: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    attn_bias: Tensor | None
    attn_scale: float | None
    dropout_p: float
    fast_zero_fill: bool
    qkv_layout: str
    attn_bias_type: str
    attn_mask_type: str
    softmax_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool | None
    rng_gen: torch.Generator | None
    fused_attention_backend: Any
    use_FAv2_bwd: bool
    fp8: bool
    fp8_meta: Any
    quantizers: Any
    deterministic: bool
    softmax_offset: Tensor | None
    fp8_output: bool
    bf16_backward: bool
    layer_number: int
    return_max_logit: bool
    packed_qkv: Tensor | None = None
    packed_kv: Tensor | None = None

    def shared(self) -> dict[str, Any]:
        """Arguments that the forward and the backward take alike, by their names."""
        of_q = parsed(self.qkv_layout).q_format
        return dict(
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
            fake_dtype=self.q.dtype,
            fused_attention_backend=self.fused_attention_backend,
            attn_scale=self.attn_scale,
            dropout=self.dropout_p,
            qkv_layout=self.qkv_layout,
            o_format=of_q,
            attn_bias_type=self.attn_bias_type,
            attn_mask_type=self.attn_mask_type,
            softmax_type=self.softmax_type,
            window_size=self.window_size,
            bottom_right_diagonal=self.bottom_right_diagonal,
        )


_ENDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class FusedAttnFunc(torch.autograd.Function):
    """`fused_attn_fwd` with `fused_attn_bwd` as its gradient. Where a packed tensor is given beside
    its views, the gradient lands on it. With fp8 `quantizers` has nine of the forward, scaling_fwd,
    and six of the backward, scaling_bwd, in the slots of META_QKV and the others."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """The output, and with return_max_logit the largest logits; args: `FunctionArguments`."""
        call = FunctionArguments(*args)
        ends = {name: getattr(call, name) for name in _ENDS}
        ctx.fp8 = call.fp8
        if call.fp8:
            out, *more = function_fp8.forward(ctx, call, ends)
            ctx.mark_non_differentiable(*more)
            return (out, *more) if more else out
        out, aux, *more = fused_attn_fwd(
            is_training=call.is_training,
            q=call.q,
            k=call.k,
            v=call.v,
            attn_bias=call.attn_bias,
            page_table_k=call.page_table_k,
            page_table_v=call.page_table_v,
            softmax_offset=call.softmax_offset,
            rng_gen=call.rng_gen,
            return_max_logit=call.return_max_logit,
            **ends,
            **call.shared(),
        )
        ctx.carriers, carriers = _carriers_of(call)
        ctx.save_for_backward(*carriers, out, *ends.values(), *aux)
        ctx.shared = call.shared() | {"deterministic": call.deterministic}
        ctx.mark_non_differentiable(*more)
        return (out, *more) if more else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> Any:
        """Gradients of q, k, v or what packs them, the bias and the sinks."""
        if ctx.fp8:
            return _returned(ctx, function_fp8.backward(ctx, d_out))
        first, *rest = ctx.saved_tensors
        layout = ctx.shared["qkv_layout"]
        q, k, v, out, *rest = _views_of(layout, ctx.carriers, first, rest)
        ends: dict[str, Any] = dict(zip(_ENDS, rest, strict=False))
        aux = rest[len(_ENDS) :]
        dq, dk, dv, dbias, doffset = fused_attn_bwd(
            q=q,
            k=k,
            v=v,
            o=out,
            d_o=d_out,
            aux_ctx_tensors=aux,
            do_format=ctx.shared["o_format"],
            dqkv_layout=layout,
            **ends,
            **ctx.shared,
        )
        found = {"q": dq, "k": dk, "v": dv, "attn_bias": dbias, "softmax_offset": doffset}
        return _returned(ctx, found)


def _returned(ctx: Any, found: dict[str, Any]) -> tuple[Any, ...]:
    """Gradients by their names, in the order of the arguments; those of views also as one of what
    packs them, if that is asked for."""
    layout, names = ctx.shared["qkv_layout"], [each.name for each in fields(FunctionArguments)]
    asked = dict(zip(names, ctx.needs_input_grad, strict=False))
    if asked.get("packed_qkv"):
        found["packed_qkv"] = base_of(layout, *[found[name] for name in "qkv"])
    if asked.get("packed_kv"):
        found["packed_kv"] = base_of(layout, found["k"], found["v"])
    return tuple(found.get(name) if wanted else None for name, wanted in asked.items())


def _carriers_of(call: FunctionArguments) -> tuple[bool, tuple[Tensor, ...]]:
    """Whether Q, K and V, or K and V, lie in one tensor; and the tensors to be saved, of which that
    is one: hooks that move what is saved then move it once."""
    layout = parsed(call.qkv_layout)
    parts = (call.q, call.k, call.v) if layout.one_length else (call.k, call.v)
    base = carrier_of(layout, parts)
    if base is None:
        return False, (call.q, call.k, call.v)
    return True, (base,) if layout.one_length else (call.q, base)


def _views_of(name: str, packed: bool, first: Tensor, rest: list[Tensor]) -> list[Tensor]:
    """Q, K and V, and what was saved behind them."""
    if not packed:
        return [first, *rest]
    layout = parsed(name)
    _, axis, _ = layout.home(*layout.packed_operands[:1])
    if layout.one_length:
        return [*first.unbind(axis), *rest]
    base, *others = rest
    return [first, *base.unbind(axis), *others]


def base_of(layout: str, *parts: Any) -> Tensor:
    """The buffer whose views these gradients of a packed layout are."""
    like, *_ = parts
    packed = parsed(layout)
    _, axis, _ = packed.home(*packed.packed_operands[:1])
    shape = list(like.shape)
    shape.insert(like.ndim + 1 + axis, len(parts))
    return like.new_empty(0).set_(like.untyped_storage()).view(shape)  # type: ignore[no-any-return]
