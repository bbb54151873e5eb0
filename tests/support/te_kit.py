"""TransformerEngine's attention, position by position in float64, and operands for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attngen import reference, te
from attngen.spec import layouts

SWITCHES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")

Bhsd = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; lengths of its sequences, and room for them in packed tokens."""

    batch: int = 3
    heads: int = 4
    groups: int = 2
    queries: int = 6
    keys: int = 9
    dim: int = 8
    dim_v: int = 8
    q_lengths: tuple[int, ...] = (6, 4, 1)
    kv_lengths: tuple[int, ...] = (9, 5, 3)

    @property
    def self_attention(self) -> Shape:
        """One length for queries and keys, one number of heads, one head dim."""
        return replace(
            self, groups=self.heads, keys=self.queries, dim_v=self.dim, kv_lengths=self.q_lengths
        )


@dataclass(frozen=True)
class Case:
    """A call in TransformerEngine's words."""

    layout: str = "bshd_bshd_bshd"
    mask: str = "no_mask"
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool | None = None
    bias_type: str = "no_bias"
    bias_shape: str = "1hss"
    softmax: str = "vanilla"
    dropout: float = 0.0
    gaps: bool = False
    slopes: bool = False
    shape: Shape = field(default=Shape())

    def __str__(self) -> str:
        words = [self.layout, self.mask, *map(str, self.window), self.bias_type, self.softmax]
        words += ["dropout"] * (self.dropout > 0) + ["gaps"] * self.gaps
        return "-".join(words)

    __hash__ = object.__hash__

    @property
    def corner(self) -> bool:
        """Whether the diagonal ends at the last key, by the rule of `fused_attn_fwd`."""
        named = self.mask.endswith("bottom_right")
        return named if self.bottom_right is None else self.bottom_right

    @property
    def pads(self) -> bool:
        """Whether sequences have lengths of their own."""
        return "padding" in self.mask or "thd" in self.layout

    def lengths(self) -> tuple[list[int], list[int]]:
        """Lengths of queries and of keys."""
        s = self.shape
        if self.pads:
            return [*s.q_lengths], [*s.kv_lengths]
        return [s.queries] * s.batch, [s.keys] * s.batch


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same for a seed."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)


def dense(case: Case, dtype: torch.dtype = torch.float64) -> Bhsd:
    """Q, K and V of a case, [b, h, s, d]."""
    s = case.shape
    q = randn(s.batch, s.heads, s.queries, s.dim, seed=1, dtype=dtype)
    k = randn(s.batch, s.groups, s.keys, s.dim, seed=2, dtype=dtype)
    v = randn(s.batch, s.groups, s.keys, s.dim_v, seed=3, dtype=dtype)
    return q, k, v


def cumulative(lengths: list[int], device: Any = None) -> Tensor:
    """Cumulative lengths, int32 [b + 1]."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).int().to(device)


def laid_out(x: Tensor, axes: str, lengths: list[int], gap: int = 0) -> Tensor:
    """A tensor [b, h, s, d] in a format; packed tokens with NaN in a gap behind each sequence."""
    if axes != "thd":
        return x.permute(["bhsd".index(axis) for axis in axes]).contiguous()
    rows = []
    for one, length in zip(x, lengths, strict=True):
        rows += [one[:, :length].transpose(0, 1), x.new_full((gap, *one[:, 0].shape), math.nan)]
    return torch.cat(rows)


def restored(x: Tensor, axes: str, lengths: list[int], most: int, gap: int = 0) -> Tensor:
    """Undo `laid_out`: [b, h, s, d], with zeros behind sequences of packed tokens."""
    if axes != "thd":
        return x.permute([axes.index(axis) for axis in "bhsd"])
    found = x.new_zeros(len(lengths), x.shape[1], most, x.shape[2])
    start = 0
    for b, length in enumerate(lengths):
        found[b, :, :length] = x[start : start + length].transpose(0, 1)
        assert not x[start + length : start + length + gap].any(), "gaps hold zeros"
        start += length + gap
    return found


def operands(case: Case, gap: int = 0, dtype: torch.dtype = torch.float64) -> Bhsd:
    """Q, K and V as the layout has them: views of the tensors that its name says."""
    parsed = layouts.parse(case.layout)
    q_lengths, kv_lengths = case.lengths()
    q, k, v = dense(case, dtype)
    q = laid_out(q, parsed.q_format, q_lengths, gap)
    k, v = (laid_out(x, parsed.kv_format, kv_lengths, gap) for x in (k, v))
    axis = {"qkv_3hd": -3, "kv_2hd": -3, "qkv_h3d": -2, "kv_h2d": -2}.get(parsed.packing)
    if parsed.packing.startswith("qkv"):
        q, k, v = torch.stack([q, k, v], axis).unbind(axis)
    elif parsed.packing.startswith("kv"):
        k, v = torch.stack([k, v], axis).unbind(axis)
    return q, k, v


def bias_of(case: Case, dtype: torch.dtype = torch.float64) -> Tensor | None:
    """A bias tensor of the case's shape."""
    if not case.bias_type.endswith("scale_bias"):
        return None
    s = case.shape
    sizes = (s.batch, s.heads, s.queries, s.keys)
    shape = [1 if letter == "1" else n for letter, n in zip(case.bias_shape, sizes, strict=True)]
    return randn(*shape, seed=4, dtype=dtype)


def offset_of(case: Case) -> Tensor | None:
    """A sink of each head, float32 [1, h, 1, 1]; zeros of an off-by-one softmax."""
    if case.softmax == "vanilla":
        return None
    made = randn(1, case.shape.heads, 1, 1, seed=5, dtype=torch.float32)
    return made if case.softmax == "learnable" else torch.zeros_like(made)


def slopes_of(heads: int) -> Tensor:
    """ALiBi's own slopes, float64 [h], by its paper."""
    n = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * k / n) for k in range(1, n + 1)]
    rest = [2 ** (-4 * (2 * k - 1) / n) for k in range(1, heads - n + 1)]
    return torch.tensor(first + rest, dtype=torch.float64)


def hidden_of(case: Case) -> Tensor:
    """[b, 1, s_q, s_kv]: what is masked out, position by position."""
    s, (q_lengths, kv_lengths) = case.shape, case.lengths()
    left, right = case.window
    hidden = torch.zeros(s.batch, 1, s.queries, s.keys, dtype=torch.bool)
    for b in range(s.batch):
        for i in range(s.queries):
            for j in range(s.keys):
                diagonal = i + (kv_lengths[b] - q_lengths[b] if case.corner else 0)
                seen = i < q_lengths[b] and j < kv_lengths[b]
                seen = seen and ("causal" not in case.mask or j <= diagonal)
                seen = seen and (left < 0 or j >= diagonal - left)
                hidden[b, :, i, j] = not (seen and (right < 0 or j <= diagonal + right))
    return hidden


def truth(
    case: Case,
    qkv: Bhsd,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    rng_state: Tensor | None = None,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [b, h, s_q, d_v], log-sum-exp [b, h, s_q], and the largest score of each head.

    qkv: [b, h, s, d] each, with whose dtype all is computed; hidden: instead of the case's masks.
    """
    q, k, v = qkv
    s, (q_lengths, kv_lengths) = case.shape, case.lengths()
    k, v = (x.repeat_interleave(s.heads // s.groups, 1) for x in (k, v))
    hidden = hidden_of(case) if hidden is None else hidden
    keys_of_none = torch.arange(s.keys) >= torch.tensor(kv_lengths)[:, None]
    k, v = (x.masked_fill(keys_of_none[:, None, :, None], 0) for x in (k, v))  # whatever is there
    scores = q @ k.transpose(-1, -2)
    scale = 1 / math.sqrt(s.dim)
    if case.bias_type == "pre_scale_bias":
        scores = scores + bias
    scores = scores * scale
    if case.bias_type == "post_scale_bias":
        scores = scores + bias
    if case.bias_type == "alibi":
        delta = torch.tensor(kv_lengths) - torch.tensor(q_lengths) if case.corner else None
        i, j = torch.arange(s.queries)[:, None], torch.arange(s.keys)
        distance = (i + (0 if delta is None else delta[:, None, None, None]) - j).abs()
        scores = scores - slopes_of(s.heads)[:, None, None] * distance
    scores = scores.masked_fill(hidden, -math.inf)
    if offset is None:
        with_sink = scores
    else:
        with_sink = torch.cat([scores, offset.to(q.dtype).expand(s.batch, -1, s.queries, 1)], -1)
    lse = with_sink.logsumexp(-1)
    weights = (scores - lse.detach()[..., None]).exp()
    weights = weights / with_sink.sub(lse.detach()[..., None]).exp().sum(-1, keepdim=True)
    weights = weights.masked_fill(hidden, 0)
    if case.dropout:
        keep = reference.dropout_keep_mask(
            rng_state, case.dropout, s.batch, s.heads, s.queries, s.keys
        )
        weights = weights * keep / (1 - round(case.dropout * 256) / 256)
    rows_of_none = torch.arange(s.queries) >= torch.tensor(q_lengths)[:, None]
    lse = lse.masked_fill(rows_of_none[:, None], -math.inf)
    return weights @ v, lse, scores.amax((0, 2, 3))


# ---- calls of the module


def module_of(case: Case, **more: Any) -> te.DotProductAttention:
    """A module for calls of a case."""
    s = case.shape
    kv_channels = s.dim if s.dim == s.dim_v else (s.dim, s.dim_v)
    given = {
        "num_gqa_groups": s.groups, "attention_dropout": case.dropout, "attn_mask_type": case.mask,
        "qkv_format": layouts.parse(case.layout).q_format, "softmax_type": case.softmax, **more,
    }  # fmt: skip
    module = te.DotProductAttention(s.heads, kv_channels, **given)
    if case.softmax == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(offset_of(case).flatten())
    return module


def arguments(case: Case) -> dict[str, Any]:
    """Arguments of a call beside its tensors."""
    given: dict[str, Any] = {
        "window_size": None if case.window == (-1, -1) else case.window,
        "bottom_right_diagonal": case.bottom_right,
        "core_attention_bias_type": case.bias_type,
    }
    if case.pads:
        q_lengths, kv_lengths = case.lengths()
        given["cu_seqlens_q"] = cumulative(q_lengths)
        given["cu_seqlens_kv"] = cumulative(kv_lengths)
        if case.gaps:
            for side, each in zip(("q", "kv"), case.lengths(), strict=True):
                starts = cumulative([n + 2 for n in each])
                given[f"cu_seqlens_{side}_padded"] = starts
    return given


def of_module(case: Case) -> Case:
    """The case with the diagonal where the module has it."""
    if case.bottom_right is not None:
        return case
    return replace(case, bottom_right=case.mask not in ("causal", "padding_causal"))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Assert that tensors agree, whatever their dtypes and strides."""
    torch.testing.assert_close(
        found.to(expected.dtype), expected, atol=tolerance, rtol=tolerance, check_stride=False
    )


def rows_of(case: Case, out: Tensor, gap: int = 0) -> Tensor:
    """The output […, h · d_v] as [b, h, s, d_v]."""
    axes = layouts.parse(case.layout).q_format
    out = out.unflatten(-1, (case.shape.heads, case.shape.dim_v))
    return restored(out, axes, case.lengths()[0], case.shape.queries, gap)
