"""FP8 as it is defined: what a stored number stands for, and the softmax whose weights are e4m3.

A stored x8 stands for x8 · descale; storing x is x · scale, saturated and rounded to nearest even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.table import AttentionCall
from ..spec.call_arguments import TOKEN_AXES

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
WEIGHTS_DTYPE = torch.float8_e4m3fn
VALUE_BINADES = 60  # of the scales of values from 1, either way, that weights are multiplied by
DEFAULT_SCALE_S = 256.0  # the power of two that leaves a weight of 1 below e4m3's largest, 448


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether this is one of the two 8-bit formats."""
    return dtype in DTYPES


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | float | None = None) -> Tensor:
    """x · scale in an 8-bit format: what is out of range becomes the largest finite number."""
    largest = torch.finfo(dtype).max
    scaled = x if scale is None else x * scale
    return scaled.clamp(-largest, largest).to(dtype)


def dequantise(
    x: Tensor,
    descale: Tensor | None,
    b: int,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> Tensor:
    """One operand of sequence b in a wider dtype, [h, s, d].

    descale: None, float32 [1] or [batch, h_kv], in which a head of a query finds that of its
    key/value head; or one a token and head, [batch, h, room], of at least as many tokens, or of
    packed ones [1, h, tokens], of which the sequence's begin with `first`.
    """
    x = x.to(dtype)
    if descale is None:
        return x
    if is_per_token(descale):
        return x * _token_scales(descale, b, first, x.shape[1]).to(dtype)[..., None]
    heads = descale if descale.ndim == 1 else descale[b]
    return x * heads.repeat_interleave(x.shape[0] // heads.shape[0])[:, None, None]


def is_per_token(descale: Tensor | None) -> bool:
    """Whether scales are one a token and head, [batch, h, s], or of packed tokens [1, h, t]."""
    return descale is not None and descale.ndim == TOKEN_AXES


def _token_scales(descale: Tensor, b: int, first: int, length: int) -> Tensor:
    """Scales a token and head of sequence b, [h, length]: of packed tokens there is one batch."""
    return descale[min(b, descale.shape[0] - 1), :, first : first + length]


def value_scales(call: AttentionCall, b: int, s: Tensor, first: int = 0) -> Tensor:
    """Scales of sequence b's values as weights are multiplied by them, [h_q, 1, s_kv], within what
    their logarithms leave finite. s: its scores; first: its first of packed tokens."""
    assert call.descale_v is not None
    heads, _, s_kv = s.shape
    scales = _token_scales(call.descale_v, b, first, s_kv).to(s.dtype)
    scales = scales.clamp(2.0**-VALUE_BINADES, 2.0**VALUE_BINADES)
    return scales.repeat_interleave(heads // scales.shape[0], dim=0)[:, None]


def softmax(
    call: AttentionCall, s: Tensor, sink: Tensor, values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Probabilities [h, s_q, s_kv] of quantised weights, and log-sum-exp [h, s_q], of scores.

    E = e^(S − m), m the largest score of a row, is stored as e4m3 with scale_s; the sum of the
    row, the sink's term in it, and the LSE are those of E itself. sink: its score [h, 1, 1].
    values: scales of values, [h, 1, s_kv], that weights are multiplied by before they are stored; m
    is the largest of S + log(scale) then.
    """
    raised = s if values is None else s + torch.log(values)
    maximum = _row_maximum(raised)
    exps = torch.exp(raised - maximum)
    sums = torch.exp(s - maximum).sum(-1, keepdim=True)
    total = sums + torch.exp(sink - maximum)  # infinite beside a sink far above: weights are 0
    lse = torch.logaddexp(maximum + torch.log(sums), sink)
    scale = DEFAULT_SCALE_S if call.scale_s is None else call.scale_s
    descale = 1 / DEFAULT_SCALE_S if call.descale_s is None else call.descale_s
    weights = quantise(exps, WEIGHTS_DTYPE, scale).to(s.dtype) * descale
    return weights / torch.where(total == 0, 1.0, total), lse.squeeze(-1)


def _row_maximum(s: Tensor) -> Tensor:
    """The largest score of each row, [h, s_q, 1]; 0 where a row sees nothing."""
    if s.shape[-1] == 0:
        return s.new_zeros((*s.shape[:-1], 1))
    maximum = s.amax(-1, keepdim=True)
    return torch.where(maximum == float("-inf"), 0.0, maximum)


def output_dtype(call: AttentionCall) -> torch.dtype:
    """The dtype of O: the one asked for, else that of Q, and bfloat16 beside FP8."""
    if call.out_dtype is not None:
        return call.out_dtype
    return torch.bfloat16 if is_fp8(call.q.dtype) else call.q.dtype


def store(o: Tensor, dtype: torch.dtype, scale_o: Tensor | None) -> Tensor:
    """An output as it is returned: rounded, and scaled and saturated where it is FP8."""
    return quantise(o, dtype, scale_o) if is_fp8(dtype) else o.to(dtype)
