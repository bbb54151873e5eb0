"""Parts of attention over a group: what each computes, and how outputs and gradients add up.

Tensors are [b, t, h, d] here, LSEs [b, h, t]; packed tokens are one batch of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.context.rows import PartRows
from ....call.context.steps import Part, Span
from ....call.positions import Positions
from ....call.table import GRADIENT_OF
from .. import backward, forward_onto  # noqa: F401  # define the operations
from ..attention import attention
from .padding import Padding


class Rows(NamedTuple):
    """Where a rank's tensors hold a sequence of the plan: rows of the batch, and tokens."""

    batch: slice
    tokens: slice

    def of(self, x: Tensor, span: Span) -> Tensor:
        """Tokens of the sequence in [b, t, h, d]."""
        begin = self.tokens.start or 0
        return x[self.batch, begin + span.begin : begin + span.end]

    def all_of(self, x: Tensor) -> Tensor:
        """The sequence in [b, t, h, d]."""
        return x[self.batch, self.tokens]

    def of_heads(self, x: Tensor, span: Span) -> Tensor:
        """Tokens of the sequence in [b, h, t]."""
        begin = self.tokens.start or 0
        return x[self.batch, :, begin + span.begin : begin + span.end]


class Sequences(NamedTuple):
    """Where a rank holds the queries and keys of one sequence of the plan, or of a batch of equal
    ones, the first of which is sequence `number` of the call."""

    queries: Rows
    keys: Rows
    number: int


@dataclass(frozen=True, eq=False)
class Features:
    """Whatever a call over a group asks of scores and weights, the same in each part.

    slopes: of ALiBi, float32 [h] or [b, h]; bias, attn_mask: of the rank's queries and all keys;
    rng_state: one for all ranks. first_head: of the group's heads. numbers: arguments that are no
    tensors. kernels: whether compiled kernels compute parts, or the reference; joins: whether these
    join a part's output with that of the parts before. by_position: whether parts say where they
    stand. padding: lengths in use of sequences that parts take as equal.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    slopes: Tensor | None = None
    attn_mask: Tensor | None = None
    rng_state: Tensor | None = None
    first_head: int = 0
    deterministic: bool = False
    kernels: bool = False
    joins: bool = False
    by_position: bool = False
    padding: Padding | None = None


@dataclass(frozen=True, eq=False)
class Stored:
    """Queries, keys and values in 8 bits, as bytes, which is how they travel.

    carriers: q, k and v; dtype: of their numbers; wide: of what these stand for. descales: float32
    [1], of all ranks alike, by the arguments' names.
    """

    carriers: tuple[Tensor, Tensor, Tensor]
    dtype: torch.dtype
    wide: torch.dtype
    descales: dict[str, Tensor]

    def numbers(self, x: Tensor) -> Tensor:
        """Stored numbers of bytes."""
        return x.view(self.dtype)

    def widened(self, name: str, x: Tensor) -> Tensor:
        """The numbers that bytes of the carrier of that name stand for."""
        return (self.numbers(x).float() * self.descales[f"descale_{name}"]).to(self.wide)


class Attended(NamedTuple):
    """Operands of a part: its queries, keys and values, and its own share of the bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    bias_learns: bool = False

    @property
    def carriers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.q, self.k, self.v


def arguments_of(features: Features, part: Part, rows: Sequences) -> dict[str, Any]:
    """The arguments of `attention` for a part, but for its bias."""
    given = dict(features.numbers)
    left, right = part.window
    if features.by_position:
        assert part.origin is not None  # the plan was asked for them
        left = -1 if part.left is None else part.left
        right = -1 if part.right is None else part.right
        given["positions"] = Positions(*part.origin, part.delta, features.first_head, rows.number)
    shift = len(part.keys) - len(part.queries)
    aligned = part.right == 0 and left == -1 and right == shift > 0
    if right == 0 or aligned:
        given["mask"], right = "causal", -1
        if aligned:
            given["bottom_right"] = True
    given["window"] = (left, right)
    if features.slopes is not None:
        per_sequence = features.slopes.ndim == 2
        given["alibi_slopes"] = features.slopes[_own(rows)] if per_sequence else features.slopes
    if features.attn_mask is not None:
        given["attn_mask"] = cut(features.attn_mask, part, rows)
    if features.rng_state is not None:
        given["rng_state"] = features.rng_state
    if features.padding is not None:
        given |= features.padding.of_part(part)
    return given


def _own(rows: Sequences) -> slice:
    """The sequences of a call that the plan has as one."""
    batch = rows.queries.batch
    whole = batch == slice(None)
    return batch if whole else slice(rows.number, rows.number + 1)


def cut(x: Tensor, part: Part, rows: Sequences) -> Tensor:
    """The part's own of a broadcast of [b, h, t, s], t the rank's queries and s all keys of the
    sequence in their order."""
    assert part.origin is not None
    key = part.origin.key
    places = (
        _own(rows),
        slice(None),
        slice(*part.queries),
        slice(key, key + len(part.keys)),
    )
    return x[tuple(slice(None) if n == 1 else s for n, s in zip(x.shape, places, strict=True))]


def forward_part(
    features: Features, part: Part, rows: Sequences, read: Attended, stored: Stored | None
) -> tuple[Tensor, Tensor]:
    """The part's output, float32 of 16-bit operands, and LSE. stored: whose numbers it reads, of
    which the output is rounded to what they stand for."""
    given = arguments_of(features, part, rows)
    if read.bias is not None:
        given["bias"] = read.bias
    if stored is not None:
        given |= {**stored.descales, "out_dtype": stored.wide}
    elif features.kernels:
        given["out_dtype"] = torch.float32
    backend = "cuda" if features.kernels else "reference"
    with torch.no_grad():
        found = attention(*read.carriers, **given, backend=backend, return_lse=True)
    out, aux = found
    assert aux.lse is not None
    return out, aux.lse


class Merged(NamedTuple):
    """Output and LSE of a part's rows once all parts are merged, and their gradients, None where
    nothing depends on the LSE."""

    out: Tensor
    lse: Tensor
    d_out: Tensor
    dlse: Tensor | None

    def of_rows(self, rows: Rows, span: Span) -> Merged:
        """The results of a part's rows."""
        dlse = self.dlse
        return Merged(
            rows.of(self.out, span),
            rows.of_heads(self.lse, span),
            rows.of(self.d_out, span),
            None if dlse is None else rows.of_heads(dlse, span).contiguous(),
        )


def backward_part(
    features: Features, part: Part, rows: Sequences, read: Attended, merged: Merged
) -> dict[str, Tensor]:
    """Gradients of a part's operands by their names (`dq`, `dk`, `dv`, `dbias`), float32 of q, k
    and v in 16 bits."""
    if features.kernels:
        return _by_kernels(features, operation_arguments(features, part, rows), read, merged)
    return _by_reference(arguments_of(features, part, rows), read, merged)


def operation_arguments(features: Features, part: Part, rows: Sequences) -> dict[str, Any]:
    """The arguments of operations for a part, but for its bias, which has outputs and gradients of
    float32."""
    given = arguments_of(features, part, rows)
    left, right = given.pop("window")
    if (places := given.pop("positions", None)) is not None:
        given["positions"] = places.words
    return {**given, "window_left": left, "window_right": right, "out_dtype": "float32"}


def _by_kernels(
    features: Features, given: dict[str, Any], read: Attended, merged: Merged
) -> dict[str, Tensor]:
    """Gradients of a part by the operation."""
    made = torch.ops.attngen.backward(
        *(merged.d_out, merged.dlse, *read.carriers, merged.out, merged.lse.contiguous()),
        **given,
        bias=read.bias,
        deterministic=features.deterministic,
        want_dbias=read.bias_learns,
    )
    return dict(zip(GRADIENT_OF.values(), made, strict=True))


def _by_reference(given: dict[str, Any], read: Attended, merged: Merged) -> dict[str, Tensor]:
    """Gradients of a part, whose output and LSE are made again, as those of the merge say."""
    leaves = [x.detach().requires_grad_() for x in read.carriers]
    q, k, v = leaves
    if read.bias is not None:
        given["bias"] = read.bias.detach().requires_grad_()
        leaves.append(given["bias"])
    with torch.enable_grad():
        out, aux = attention(q, k, v, **given, backend="reference", return_lse=True)
    lse = aux.lse
    assert lse is not None
    wanted = torch.autograd.grad([out, lse], leaves, gradients_within(merged, out, lse))
    return dict(zip(("dq", "dk", "dv", "dbias"), wanted, strict=False))


def gradients_within(merged: Merged, out: Tensor, lse: Tensor) -> list[Tensor]:
    """The gradients of a part's output [.., t, h, d_v] and LSE [.., h, t], in their dtypes, which
    the merge of all parts has from those of what it made."""
    share = torch.where(lse == -torch.inf, 0.0, (lse - merged.lse).exp()).detach()
    of_lse = (merged.d_out * (out.detach() - merged.out)).sum(-1).transpose(-1, -2)
    of_lse = of_lse if merged.dlse is None else of_lse + merged.dlse
    d_out = merged.d_out * share.transpose(-1, -2).unsqueeze(-1)
    return [d_out.to(out.dtype), share * of_lse]


@dataclass(eq=False)
class Running:
    """Output and LSE of a rank's queries over the keys that have come by. shape: of the output,
    [b, t, h, d_v]; dtype: of sums. A first part of all rows is taken as it is. rounded: the output
    in q's dtype, as far as kernels have rounded it. is_begun: whether each row is in a part of
    which all are new, which begins them."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    rounded: Tensor | None = None
    is_begun: bool = False
    _sums: tuple[Tensor, Tensor] | None = None
    _is_made: bool = False  # of whatever was there

    @classmethod
    def before(
        cls,
        q: Tensor,
        v: Tensor,
        dtype: torch.dtype,
        sink: Tensor | None,
        used: Sequence[tuple[Rows, Span]],
    ) -> Running:
        """No keys yet, but the score of each head that no key has, [h], in rows in use."""
        found = cls(torch.Size((*q.shape[:-1], v.shape[-1])), dtype, q.device)
        if sink is not None:
            _, lse = found.sums
            for rows, span in used:
                rows.of_heads(lse, span).copy_(sink[:, None])
        return found

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        """The output, and the LSE [b, h, t], −∞ of rows that have seen no key."""
        if self._sums is None:
            batch, tokens, heads, _ = self.shape
            out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            lse = out.new_full((batch, heads, tokens), -torch.inf)
            self._sums = out, lse
        return self._sums

    def add(
        self, rows: Rows, span: Span, out: Tensor, lse: Tensor, mark: PartRows | None = None
    ) -> None:
        """Join a part of these rows. mark: what it has of them, if that is known."""
        out, lse = out.to(self.dtype), lse.to(self.dtype)
        if self._sums is None and out.shape == self.shape:
            self._sums = out, lse
            return
        self._begin()
        whole_out, whole_lse = self.sums
        whole, own = rows.of_heads(whole_lse, span), rows.of(whole_out, span)
        if self._is_made and mark is not None and mark.new:
            own.copy_(out)
            whole.copy_(lse)
            return
        joined = torch.logaddexp(whole, lse)
        share = (lse - joined).exp().masked_fill(joined == -torch.inf, 0)
        own.lerp_(out, _by_row(share))
        whole.copy_(joined)

    def begins(self, joins: bool, dtype: torch.dtype) -> bool:
        """Make the memory of all rows, if each is begun by a part and kernels join; whether it is
        there. dtype: of what these round."""
        if joins and self.is_begun:
            self._begin()
            whole, _ = self.sums
            self.rounded = torch.empty_like(whole, dtype=dtype)
        return self.rounded is not None

    def _begin(self) -> None:
        """Make memory that nobody has written, where the first parts do and nothing is there."""
        if self._sums is None and self.is_begun:
            batch, tokens, heads, _ = self.shape
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._sums = out, out.new_empty((batch, heads, tokens))
            self._is_made = True

    def attend(
        self, features: Features, part: Part, rows: Sequences, read: Attended, mark: PartRows
    ) -> None:
        """Join a part by kernels that go on from what there is. mark: of the part's rows, the last
        of which are rounded, and kept in float32 where others are not the last."""
        self._begin()
        whole_out, whole_lse = self.sums
        rounded = None
        if mark.last:
            if self.rounded is None:
                new = torch.empty_like if self.is_begun else torch.zeros_like
                self.rounded = new(whole_out, dtype=read.q.dtype)
            rounded = rows.queries.of(self.rounded, part.queries)
        torch.ops.attngen.forward_onto(
            *read.carriers,
            rows.queries.of(whole_out, part.queries),
            rows.queries.of_heads(whole_lse, part.queries),
            rounded,
            None,
            not (self._is_made and mark.new),
            not mark.over,
            **operation_arguments(features, part, rows),
            bias=read.bias,
        )


def _by_row(x: Tensor) -> Tensor:
    """Numbers of rows, [b, h, t], as factors of [b, t, h, d]."""
    return x.transpose(1, 2).unsqueeze(-1)


def sink_gradient(sink: Tensor, merged: Merged, used: Sequence[tuple[Rows, Span]]) -> Tensor:
    """The gradient of the sink [h] by this rank's rows: −Σ e^(α − LSE) · D."""
    found = torch.zeros_like(sink, dtype=merged.lse.dtype)
    for rows, span in used:
        out, d_out = rows.of(merged.out, span), rows.of(merged.d_out, span)
        lse = rows.of_heads(merged.lse, span)
        delta = (out.to(lse.dtype) * d_out.to(lse.dtype)).sum(-1).transpose(1, 2)
        if merged.dlse is not None:
            delta = delta - rows.of_heads(merged.dlse, span)
        found -= (sink_weights(sink, lse) * delta).sum((0, 2))
    return found.to(sink.dtype)


def sink_weights(sink: Tensor, lse: Tensor) -> Tensor:
    """The weight e^(α − LSE) of the sink [h] in rows [b, h, t]; 0 where a row has nothing, not even
    it."""
    return (sink[:, None] - lse).exp().masked_fill(lse == -math.inf, 0)
