"""The backward of FP8 attention as it is defined: what is stored in 8 bits, where, by which scale.

The normalised weights P are stored in Q's type, dS in that of dO, the gradients as one likes; all
else has the accumulation's dtype. A mixed backward stores P and dS in bfloat16. Where dO has 16
bits or more, neither is stored: these are the gradients of 16 bits that an FP8 forward has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.dropout import drop_threshold, keep_scale
from ..call.fp8_scales import LARGEST_EXPONENT, scale_of_weights
from ..call.table import GRADIENT_OF, LEARNED, REFERENCE_ROWS, AttentionCall, make_call, named
from ..spec import layouts
from . import dropout, fp8
from .checks import check, check_values
from .conversions import converted, with_dtypes
from .core import scores_of_products, softmax_offset, softmax_scale, without_autocast
from .fp8_backward_checks import check_backward
from .fp8_backward_tensors import BackwardOperands, Fp8Gradients
from .operands import Operands
from .sequences import Span, kv_spans, q_spans, sequence_view


def fp8_backward(
    given: BackwardOperands,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    accumulate: torch.dtype = torch.float32,
    **arguments: Any,
) -> Fp8Gradients:
    """Gradients of `reference.attention(q, k, v, **arguments)` of FP8 operands.

    accumulate: float32, or float64 for all that is not stored.

    Raises: SpecError with every violation at once.
    """
    call = make_call("reference.fp8_backward", REFERENCE_ROWS, dict(q=q, k=k, v=v), arguments)
    return differentiate_call(converted(call), given, accumulate)


@torch.no_grad()
def differentiate_call(
    call: AttentionCall, given: BackwardOperands, accumulate: torch.dtype = torch.float32
) -> Fp8Gradients:
    """Gradients of a call that is already a value. Raises: SpecError with every violation."""
    operands = check(call)
    check_backward(call, operands, given)
    call = with_dtypes(call)
    queries, keys = q_spans(call, operands), kv_spans(call, operands)
    check_values(call, operands, queries, keys)
    call = AttentionCall(**{**named(call), **_learned(call, accumulate)})
    sums = _Sums.of(call, accumulate)
    with without_autocast(call.q.device.type):
        for b, spans in enumerate(zip(queries, keys, strict=True)):
            _add_sequence(call, given, _Sequence(operands, b, *spans), sums)
    return sums.stored(given)


def _learned(call: AttentionCall, dtype: torch.dtype) -> dict[str, Tensor]:
    """The learned operands of a call by their names, in a dtype."""
    given = ((name, getattr(call, name)) for name in LEARNED)
    return {name: x.detach().to(dtype) for name, x in given if x is not None}


@dataclass(frozen=True, eq=False)
class _Sequence:
    """Sequence b of a call: its operands, and where its positions lie."""

    operands: Operands
    b: int
    queries: Span
    keys: Span

    def of_q(self, x: Tensor) -> Tensor:
        """The sequence in a tensor of Q's format, [h, s_q, …]."""
        return sequence_view(x, self.operands.layout.q_format, self.b, self.queries)

    def of_kv(self, x: Tensor) -> Tensor:
        """The sequence in a tensor of K's format, [h, s_kv, …]."""
        return sequence_view(x, self.operands.layout.kv_format, self.b, self.keys)

    def rows(self, x: Tensor) -> Tensor:
        """The sequence in a tensor of rows, [b, h, s] or [h, t]: [h, s_q]."""
        if x.ndim == 2:
            return x[:, self.queries.start : self.queries.start + self.queries.length]
        return x[self.b, :, : self.queries.length]


@dataclass(frozen=True, eq=False)
class _Sums:
    """Gradients before they are stored: of the carriers, with views of q's, k's and v's parts, and
    of learned operands, by the operands' names."""

    carriers: dict[str, Tensor]
    parts: dict[str, Tensor]
    learned: dict[str, Tensor]
    amax_dp: Tensor

    @classmethod
    def of(cls, call: AttentionCall, dtype: torch.dtype) -> _Sums:
        """Zeros for a call's gradients."""
        given = {"q": call.q, "k": call.k, "v": call.v}
        carriers = {
            name: torch.zeros(x.shape, dtype=dtype, device=x.device)
            for name, x in given.items()
            if x is not None
        }
        layout = layouts.parse(call.layout)
        q, k, v = layouts.unpack(layout, *(carriers.get(name) for name in given))
        return cls(
            carriers=carriers,
            parts={"q": q, "k": k, "v": v},
            learned={name: torch.zeros_like(x) for name, x in _learned(call, dtype).items()},
            amax_dp=torch.zeros(1, dtype=dtype, device=call.q.device),
        )

    def stored(self, given: BackwardOperands) -> Fp8Gradients:
        """The results: parts of packed tensors may have scales of their own."""
        maxima = {name: _amax(x).float() for name, x in self.parts.items()}
        if fp8.is_fp8(given.dtype):
            scales = given.scale_dq, given.scale_dk, given.scale_dv
            for name, scale in zip("qkv", scales, strict=True):
                if scale is not None:
                    self.parts[name].mul_(scale)
        found = {name: fp8.store(x, given.dtype, None) for name, x in self.carriers.items()}
        return Fp8Gradients(
            dq=found["q"],
            dk=found.get("k"),
            dv=found.get("v"),
            learned={GRADIENT_OF[name]: x for name, x in self.learned.items()},
            amax_dp=self.amax_dp.float(),
            amax_dq=maxima["q"],
            amax_dk=maxima["k"],
            amax_dv=maxima["v"],
        )


def _add_sequence(
    call: AttentionCall, given: BackwardOperands, sequence: _Sequence, sums: _Sums
) -> None:
    """Add the gradients of one sequence."""
    x = _dequantised(call, given, sequence, sums.amax_dp.dtype)
    scale = softmax_scale(call, x.q.shape[-1])

    def score(products: Tensor, *leaves: Tensor) -> Tensor:
        changed = dict(zip(sums.learned, leaves, strict=True))
        return scores_of_products(
            AttentionCall(**{**named(call), **changed}), sequence.b, products, scale
        )

    leaves = [getattr(call, name) for name in sums.learned]
    # An operation runs below autograd, which would record nothing there.
    s, pull = torch.func.vjp(score, x.q @ x.k.transpose(1, 2), *leaves)  # type: ignore[misc]
    weights = _weights(s, x.lse)
    keep = _keep_factors(call, sequence.b, weights)

    d_s = weights * (keep * (x.d_o @ x.v.transpose(1, 2)) - x.delta[..., None])
    d_products, *of_leaves = pull(d_s)
    for total, each in zip(sums.learned.values(), of_leaves, strict=True):
        total.add_(each)
    if call.sink is not None:  # which scores do not depend on
        of_sink = torch.exp(softmax_offset(call, s).squeeze(-1) - x.lse)
        of_sink = of_sink.masked_fill(x.lse == float("-inf"), 0)  # not even a sink
        sums.learned["sink"].sub_((of_sink * x.delta).sum(-1))
    torch.maximum(sums.amax_dp, _amax(d_products), out=sums.amax_dp)

    weights = weights * keep
    if fp8.is_fp8(given.d_o.dtype):
        stored = torch.bfloat16 if given.mixed else None
        weights = _stored_weights(call, weights, stored or call.q.dtype)
        scales = given.scale_dp, given.descale_dp
        if given.scale_dp is None:
            scales = chosen_scale_dp(x, scale * keep_scale_of(call), given.d_o.dtype)
        d_products = _stored(d_products, stored or given.d_o.dtype, *scales)
    dk, dv = d_products.transpose(1, 2) @ x.q, weights.transpose(1, 2) @ x.d_o
    sequence.of_q(sums.parts["q"]).add_(d_products @ x.k)
    sequence.of_kv(sums.parts["k"]).add_(x.of_group(dk))
    sequence.of_kv(sums.parts["v"]).add_(x.of_group(dv))


@dataclass(frozen=True, eq=False)
class Dequantised:
    """One sequence in the accumulation's dtype: q [h_q, s_q, d], k [h_q, s_kv, d], v [h_q, s_kv,
    d_v] and d_o [h_q, s_q, d_v], lse and delta, rowsum(dO ∘ O) − dLSE, [h_q, s_q]. heads: those of
    K and V before they were repeated."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor
    lse: Tensor
    delta: Tensor
    heads: int

    def of_group(self, x: Tensor) -> Tensor:
        """Sums over the query heads that share one of K and V, [h_kv, …] of [h_q, …]."""
        return x.reshape(self.heads, x.shape[0] // self.heads, *x.shape[1:]).sum(1)


def _dequantised(
    call: AttentionCall, given: BackwardOperands, sequence: _Sequence, dtype: torch.dtype
) -> Dequantised:
    b, operands, first = sequence.b, sequence.operands, sequence.keys.start
    q = sequence.of_q(operands.q)
    q = fp8.dequantise(q, call.descale_q, b, dtype, sequence.queries.start)
    k = fp8.dequantise(sequence.of_kv(operands.k), call.descale_k, b, dtype, first)
    v = fp8.dequantise(sequence.of_kv(operands.v), call.descale_v, b, dtype, first)
    d_o = fp8.dequantise(sequence.of_q(given.d_o), given.descale_do, b, dtype)
    o = fp8.dequantise(sequence.of_q(given.o), given.descale_o, b, dtype)
    delta = (d_o * o).sum(-1)
    if given.dlse is not None:
        delta = delta - sequence.rows(given.dlse).to(dtype)
    group = q.shape[0] // k.shape[0]
    k_of_q, v_of_q = (x.repeat_interleave(group, dim=0) for x in (k, v))
    lse = sequence.rows(given.lse).to(dtype)
    return Dequantised(q, k_of_q, v_of_q, d_o, lse, delta, k.shape[0])


def _weights(s: Tensor, lse: Tensor) -> Tensor:
    """P = e^(S − LSE), 0 where a row sees nothing."""
    seen = lse > float("-inf")
    return torch.exp(s - torch.where(seen, lse, 0.0)[..., None]) * seen[..., None]


def keep_scale_of(call: AttentionCall) -> float:
    """The factor of weights that dropout keeps; 1 without."""
    return keep_scale(call.dropout_p) if call.dropout_p > 0 else 1.0


def _keep_factors(call: AttentionCall, b: int, weights: Tensor) -> Tensor:
    """Factors of the weights of sequence b under dropout, [h_q, s_q, s_kv]: 0 of dropped ones."""
    if not call.dropout_p > 0:
        return torch.ones_like(weights)
    assert call.rng_state is not None  # checked with the call
    drawn = dropout.bytes_of(call, call.rng_state, b, weights.shape)
    return (drawn >= drop_threshold(call.dropout_p)).to(weights.dtype) * keep_scale_of(call)


def _stored_weights(call: AttentionCall, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalised weights as they are stored, in Q's type or a wider one, with the forward's
    scale."""
    if call.scale_s is not None:
        return _stored(weights, dtype, call.scale_s, call.descale_s)
    scale = chosen_scale_s(call.q.dtype, call.dropout_p)
    return _stored(weights, dtype, scale, 1 / scale)


def chosen_scale_s(dtype: torch.dtype, dropout_p: float) -> float:
    """`scale_of_weights` of a dtype."""
    return scale_of_weights(torch.finfo(dtype).max, dropout_p)


def chosen_scale_dp(x: Dequantised, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales of dS and their reciprocals, [h_q, 1, 1], one a head of K and V: the largest power of
    two with which nothing can saturate, as |dS| ≤ factor · (|dO_i| · max |V_j| + |D_i|)."""
    of_keys = torch.linalg.vector_norm(x.v, dim=-1)
    of_keys = _largest(of_keys, -1)
    bounds = torch.linalg.vector_norm(x.d_o, dim=-1) * of_keys + x.delta.abs()
    bound = _largest(bounds, -1).unflatten(0, (x.heads, -1)).amax(1) * abs(factor)
    scale = power_of_two(torch.finfo(dtype).max / bound)
    scale = scale.repeat_interleave(x.q.shape[0] // x.heads)[:, None, None]
    return scale, 1 / scale


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is not above each number, within 2^±126; 1 for those that are
    not positive and finite."""
    exponent = torch.frexp(x).exponent - 1
    exponent = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    usable = (x > 0) & (x < float("inf"))
    return torch.where(usable, torch.ldexp(torch.ones_like(x), exponent), 1.0)


def _stored(
    x: Tensor, dtype: torch.dtype, scale: Tensor | float | None, descale: Tensor | float | None
) -> Tensor:
    """A tensor as its stored numbers stand for it."""
    read = fp8.quantise(x, dtype, scale).to(x.dtype)
    return read if descale is None else read * descale


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude, [1]; 0 of nothing."""
    return _largest(x.detach().abs().flatten(), 0)


def _largest(x: Tensor, dim: int) -> Tensor:
    """The largest of numbers that are not negative along an axis, which stays; 0 of none."""
    if x.shape[dim] == 0:
        sizes = [*x.shape]
        sizes[dim] = 1
        return x.new_zeros(sizes)
    return x.amax(dim, keepdim=True)
