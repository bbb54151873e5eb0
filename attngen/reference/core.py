"""Attention of one sequence, as it is defined: every term in its order, nothing fused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..call.dropout import drop_threshold, keep_scale
from ..call.fragments import KNOWN, fragments_of
from ..call.table import AttentionCall
from ..fragments.header import Fragment
from . import dropout, fp8
from .callables import map_scores
from .fragments import operands_of_sequence, positions, scored_by
from .masks import diagonal_of, hides, sequence_slice, sequence_visible

NEG_INF = float("-inf")
# Scores that an argument of their own asks for, in the order of their headers. One that is named
# below is defined there; every other one in its header.
_SWITCHED = sorted(
    (each for each in KNOWN["score"].values() if not each.called), key=attrgetter("order", "name")
)
_BEFORE = tuple(each for each in _SWITCHED if each.order < 0)
_BEHIND = tuple(each for each in _SWITCHED if each.order >= 0)


@dataclass(frozen=True, eq=False)
class SequenceResult:
    """o [h_q, s_q, d_v], lse [h_q, s_q], max_logit [h_q]; all in the accumulation's dtype."""

    o: Tensor
    lse: Tensor
    max_logit: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for operands of 8, 16 and 32 bits, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """ALiBi's own slopes, float32 [heads].

    Source: O. Press et al., "Train Short, Test Long", ICLR 2022, and its public code for head
    counts that are no power of two.
    """
    n = 1 << (heads.bit_length() - 1) if heads > 0 else 1
    # Made on the device: a copy from the host could not be captured in a graph.
    k = torch.arange(1, heads + 1, dtype=torch.float64, device=device)
    exponents = torch.where(k <= n, 8 / n * k, 4 / n * (2 * (k - n) - 1))
    return torch.exp2(-exponents).float()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast, which would multiply in 16 bits."""
    if device_type == "meta":  # of which autocast knows nothing
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def attend_one(
    call: AttentionCall,
    b: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng_state: Tensor | None,
    accumulate: torch.dtype | None = None,
    first: tuple[int, int] = (0, 0),
) -> SequenceResult:
    """Attention of sequence b, whose operands hold its actual positions and no others.

    q [h_q, s_q, d], k [h_kv, s_kv, d], v [h_kv, s_kv, d_v] in any floating dtype.
    rng_state: int64 [2], needed where the call drops anything. accumulate: the dtype of what is not
    stored; None for the operands' own. first: where the sequence's scales begin among those of
    packed tokens, of queries and of keys.
    """
    group = q.shape[0] // k.shape[0]
    eight_bit, by_token = fp8.is_fp8(q.dtype), fp8.is_per_token(call.descale_v)
    dtype = accumulation_dtype(q.dtype) if accumulate is None else accumulate
    if eight_bit:
        q = fp8.dequantise(q, call.descale_q, b, dtype, first[0])
    if fp8.is_fp8(k.dtype):
        k = fp8.dequantise(k, call.descale_k, b, dtype, first[1])
        of_v = None if by_token else call.descale_v
        v = fp8.dequantise(v, of_v, b, dtype)
    k = k.to(dtype).repeat_interleave(group, dim=0)
    v = v.to(dtype).repeat_interleave(group, dim=0)
    s = scores(call, b, q.to(dtype), k)
    sink = softmax_offset(call, s)
    values = fp8.value_scales(call, b, s, first[1]) if by_token else None
    p, lse = fp8.softmax(call, s, sink, values) if eight_bit else softmax(s, sink)
    if call.dropout_p > 0:
        assert rng_state is not None
        drawn = dropout.bytes_of(call, rng_state, b, s.shape)
        keep = drawn >= drop_threshold(call.dropout_p)
        p = torch.where(keep, p * keep_scale(call.dropout_p), 0.0)
    return SequenceResult(o=p @ v, lse=lse, max_logit=max_logit(s))


def scores(call: AttentionCall, b: int, q: Tensor, k: Tensor) -> Tensor:
    """Final scores of sequence b, [h_q, s_q, s_kv], −∞ where a query does not see a key.

    q [h_q, s_q, d] and k [h_q, s_kv, d], both in the accumulation's dtype.
    """
    return scores_of_products(call, b, q @ k.transpose(1, 2), softmax_scale(call, q.shape[-1]))


def softmax_scale(call: AttentionCall, head_dim: int) -> float:
    """The factor of scores: the call's, else 1/√d."""
    return 1 / math.sqrt(head_dim) if call.softmax_scale is None else call.softmax_scale


def scores_of_products(call: AttentionCall, b: int, products: Tensor, scale: float) -> Tensor:
    """Final scores of sequence b of its products Q Kᵀ, [h_q, s_q, s_kv]; scale: their factor."""
    heads, s_q, s_kv = products.shape
    seen = sequence_visible(call, b, heads, s_q, s_kv)

    def hide(x: Tensor, value: float) -> Tensor:
        return torch.where(seen, x, value)

    # Hidden scores are 0 on the way to −∞: no term below can turn what a masked position holds
    # into NaN in the forward, nor 0 · ∞ into NaN in the backward.
    s = hide(products, 0.0)
    bias = None
    if call.bias is not None:
        bias = hide(sequence_slice(call.bias, b, s_q, s_kv).to(s.dtype), 0.0)
        if call.bias_type == "pre_scale":
            s, bias = s + bias, None
    s = s * scale
    for each in _BEFORE:
        s = switched_scores(call, b, s, each, bias)
    if isinstance(call.score_mod, str):
        named = fragments_of("none", call.score_mod)
        s = fragment_scores(call, b, s, named, dict(call.fragment_arguments))
    elif call.score_mod is not None:
        masked = hides(call) or call.mask_mod is not None or call.block_mask is not None
        s = map_scores(call.score_mod, s, b, seen if masked else None)
    for each in _BEHIND:
        s = switched_scores(call, b, s, each, bias)
    return hide(s, NEG_INF)


def switched_scores(
    call: AttentionCall, b: int, s: Tensor, fragment: Fragment, bias: Tensor | None
) -> Tensor:
    """Scores of sequence b behind one that an argument of its own asks for; themselves where the
    call does not. bias: what is added to scaled scores [h_q, s_q, s_kv], None for nothing."""
    if fragment.name == "softcap":
        return call.softcap * torch.tanh(s / call.softcap) if call.softcap > 0 else s
    if fragment.name == "post_scale_bias":
        return s if bias is None else s + bias
    if fragment.name == "alibi":
        return s + alibi(call, b, s) if call.has_alibi else s
    if fragment.name in ("pre_scale_bias", "token_scales"):  # products have them already
        return s
    given = {operand.name: getattr(call, operand.name) for operand in fragment.operands}
    if any(x is None for x in given.values()):
        return s
    return fragment_scores(call, b, s, (fragment,), given)


def fragment_scores(
    call: AttentionCall,
    b: int,
    s: Tensor,
    fragments: Sequence[Fragment],
    given: Mapping[str, Any],
) -> Tensor:
    """Scores [h_q, s_q, s_kv] of sequence b as fragments make them, one behind the other. given:
    their operands by their names."""
    _, s_q, s_kv = s.shape
    delta = diagonal_of(call, b, s_q, s_kv)
    known = positions(s_q, s_kv, delta, s.device)
    for each in fragments:
        operands = {
            name: x.to(s.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in operands_of_sequence(given, each, b).items()
        }
        s = scored_by(each, operands, known, s)
    return s


def alibi(call: AttentionCall, b: int, s: Tensor) -> Tensor:
    """ALiBi's term −m_h · |i + Δ − j| for scores [h_q, s_q, s_kv], in their dtype."""
    heads, s_q, s_kv = s.shape
    slopes = call.alibi_slopes
    if not isinstance(slopes, Tensor):
        slopes = default_alibi_slopes(heads, s.device)
    if slopes.ndim == 2:
        slopes = slopes[b]
    delta = diagonal_of(call, b, s_q, s_kv)
    i = torch.arange(s_q, device=s.device)[:, None]
    j = torch.arange(s_kv, device=s.device)[None, :]
    distance = (i + delta - j).abs().to(s.dtype)
    return -slopes.to(s.dtype)[:, None, None] * distance


def softmax_offset(call: AttentionCall, s: Tensor) -> Tensor:
    """The score of the sink, [h_q, 1, 1]: −∞ where the softmax has none, so that e^sink is 0."""
    if call.softmax == "learnable":
        assert call.sink is not None
        return call.sink.to(s.dtype)[:, None, None]
    value = 0.0 if call.softmax == "off_by_one" else NEG_INF
    return s.new_full((s.shape[0], 1, 1), value)


def softmax(s: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [h, s_q, s_kv] and log-sum-exp [h, s_q] of scores beside one sink score.

    A row in which nothing is visible has probabilities 0 and, without a sink, LSE −∞; its
    gradients are 0. sink: [h, 1, 1].
    """
    scores_and_sink = torch.cat([s, sink.expand(-1, s.shape[1], 1)], dim=-1)
    # The maximum cancels in both results, so it needs no gradient.
    maximum = scores_and_sink.detach().amax(-1, keepdim=True)
    maximum = torch.where(maximum == NEG_INF, 0.0, maximum)
    exps = torch.exp(scores_and_sink - maximum)
    total = exps.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, NEG_INF, maximum + torch.log(total))
    return (exps / total)[..., :-1], lse.squeeze(-1)


def max_logit(s: Tensor) -> Tensor:
    """The largest score of each head, [h], −∞ where there is none; carries no gradient."""
    nothing = s.new_full((s.shape[0], 1), NEG_INF)
    return torch.cat([s.detach().flatten(1), nothing], dim=1).amax(1)
