"""Ranks of a group in one process, one after another, for checks and times on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attngen.call.context.order import Order
from attngen.call.context.rounds import Region
from attngen.call.context.steps import Span
from attngen.frontends.pytorch.context.calls import (
    Ranks,
    asked_of,
    context_call,
    features_of,
    sink_of,
)
from attngen.frontends.pytorch.context.function import ContextAttention, ContextCall
from attngen.frontends.pytorch.context.messages import (
    Around,
    Finish,
    Pair,
    Visit,
    message_of,
    tokens_of,
)
from attngen.frontends.pytorch.context.together import AroundTogether, add_tokens, cut_tokens


@dataclass(frozen=True, eq=False)
class InPlace(Around):
    """Keys of ranks that are all at hand, and sums of the gradients that are sent to each.

    held: of every rank; sums: of gradients that others make of its keys, to which these are added
    where they are made, for checks; received: for times, by step and tokens what stands for
    gradients that others send, which are added where they are received, None for checks. regions:
    what came once; for times memory of all ranks alike, whose numbers are those of any.
    """

    held: list[Pair] = field(default_factory=list)
    sums: list[Pair] = field(default_factory=list)
    received: dict[tuple[int, int], Pair] | None = None
    regions: dict[object, Pair] = field(default_factory=dict)
    keeps_regions: bool = True

    def room(self, region: Region, k: Tensor, v: Tensor) -> Pair:
        if self.received is not None:
            return self._any_room(region, k)
        found = self.regions.get(id(region))
        if found is None:
            k_room, v_room = found = super().room(region, k, v)
            if self.keeps_regions:
                self.regions[id(region)] = found
            for number, place in region.places.items():
                _, source = self.around(number)
                (span,) = self.spans(self.rank, number)
                for room, x in zip((k_room, v_room), self.held[source], strict=True):
                    own = x.transpose(0, 1)[slice(*span)]
                    room[slice(*place)] = own[: len(place)]
        return found

    def _any_room(self, region: Region, k: Tensor) -> Pair:
        """A region whose memory that of the same steps shares, of any rank in either direction,
        with room for all keys of a rank for each step."""
        steps = tuple(region.places)
        if steps not in self.regions:
            ranks = [self.held[(self.rank - n) % len(self.plans)] for n in steps]
            empty = k.new_empty(0, *k.transpose(0, 1).shape[1:])
            of_k, of_v = (
                (torch.cat([x.transpose(0, 1) for x in each]) for each in zip(*ranks, strict=True))
                if ranks
                else (empty, empty)
            )
            self.regions[steps] = of_k, of_v
        of_k, of_v = self.regions[steps]
        return of_k[: region.tokens], of_v[: region.tokens]

    def ask(self, steps: Sequence[int], own: Pair, rooms: Mapping[int, Pair]) -> list[Any]:
        return []

    def give(
        self, steps: Sequence[int], made: Mapping[int, Pair], like: Pair, dtype: torch.dtype
    ) -> tuple[list[Any], list[tuple[Span, Pair]]]:
        if self.received is not None:
            return [], [*self._received(steps, like, dtype)]
        for number in made:  # each rank receives as much as it sends, in the mean
            _, source = self.around(number)
            (span,) = self.spans(self.rank, number)
            for total, x in zip(self.sums[source], made[number], strict=True):
                total[:, span.begin : span.end].add_(x.to(dtype).transpose(0, 1))
        return [], []

    def _received(
        self, steps: Sequence[int], like: Pair, dtype: torch.dtype
    ) -> Iterator[tuple[Span, Pair]]:
        """Stand-ins of gradients of the rank's keys, made once."""
        assert self.received is not None
        for number in steps:
            reader, _ = self.around(number)
            (span,) = self.spans(reader, number)
            key = number, len(span)
            if len(span) and key not in self.received:
                dk, dv = (x.new_zeros(len(span), *x.shape[1:], dtype=dtype) for x in like)
                self.received[key] = dk, dv
            if len(span):
                yield span, self.received[key]

    def _fetch(self, number: int, k: Tensor, v: Tensor) -> Any:
        source = (self.rank - number) % len(self.plans)
        step = self.plans[self.rank][number % len(self.plans)]
        spans = self.spans(self.rank, number % len(self.plans))
        return lambda: Visit(step.parts, spans, self._cut(*self.held[source], spans))

    def returns(self, number: int, made: Any, dtype: torch.dtype) -> Finish:
        if number == 0:
            return super().returns(number, made, dtype)
        _, source = self.around(number)
        spans = self.spans(self.rank, number)
        flat = message_of(made).to(dtype) if tokens_of(spans) else None
        # Each rank receives as much as it sends, in the mean: the time of adding it is here.
        return lambda _: (
            None
            if flat is None
            else self._add(self.sums[source], spans, self._pairs(flat, spans, made))
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TogetherInPlace(AroundTogether):
    """`InPlace` of packed sequences."""

    held: list[Pair] = field(default_factory=list)
    sums: list[Pair] = field(default_factory=list)

    def _fetch(self, number: int, k: Tensor, v: Tensor) -> Callable[[], Pair]:  # type: ignore[override]
        if number >= len(self.plans):
            return lambda: (k, v)
        _, source = self.around(number)
        own = self.sent[self.rank][number]
        pair = cut_tokens(self.held[source], own) if own.tokens else (k[:, :0], v[:, :0])
        return lambda: pair

    def returns(self, number: int, made: Any, dtype: torch.dtype) -> Finish:
        if number == 0:
            return super().returns(number, made, dtype)
        ((dk, dv),), (_, source) = made, self.around(number)
        own = self.sent[self.rank][number]
        pair = dk.to(dtype), dv.to(dtype)
        return lambda _: add_tokens(self.sums[source], pair, own) if own.tokens else None


@dataclass(frozen=True, eq=False)
class Simulated:
    """A rank: its call, its operands, which learn, and its score of each head that no key has."""

    call: ContextCall
    leaves: list[Tensor]
    sink: Tensor | None
    index: Tensor

    def run(self) -> tuple[Tensor, Tensor]:
        """Its output and LSE."""
        packed = self.leaves[0].ndim == 3
        operands = [x[None] if packed else x for x in self.leaves]
        out, lse = ContextAttention.apply(self.call, *operands, self.sink, None)  # type: ignore[no-untyped-call]
        return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def ranks_of(
    order: Order,
    operands: list[Tensor],
    given: dict[str, Any],
    sums: list[Pair],
    keeps_regions: bool = True,
    receives: bool = False,
) -> Iterator[Simulated]:
    """The ranks of a call over [1, s, h, d], or over packed tokens, by kernels. sums: an empty
    list, which gets float32 tensors to which they add gradients of keys that others hold, two for
    each of these. keeps_regions: whether keys that come are copied once, which takes later runs no
    time; receives: whether rounds add stand-ins of gradients to sums of their rank, as one of a
    group does, and nothing to `sums`."""
    q, *_ = operands
    packed = given.get("layout") == "thd"
    axis, device = 0 if packed else 1, q.device
    rooms = [q.shape[1]]
    if packed:
        starts = given.get("cu_seqlens_q_padded", given["cu_seqlens_q"]).tolist()
        rooms = [b - a for a, b in pairwise(starts)]
    index = [torch.tensor(order.shard(r, rooms), device=device) for r in range(order.ranks)]
    leaves = [[x.index_select(axis, own).requires_grad_() for x in operands] for own in index]
    held: list[Pair] = []
    for _, k, v in leaves:
        k, v = (x.detach()[None] if packed else x.detach() for x in (k, v))
        held.append((k, v))
    for k, v in held:
        sums.append((torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v).float()))
    received, regions = dict[tuple[int, int], Pair](), dict[object, Pair]()
    for rank, (own, places) in enumerate(zip(leaves, index, strict=True)):
        own_q, own_k, own_v = own
        asked = asked_of(own_q, own_k, own_v, {**given, "backend": "cuda"}, order.ranks)
        features = features_of(asked, given.get("rng_state"), 0, q.shape[-2])
        ranks = Ranks(None, order.ranks, rank)
        call = context_call(asked, order, ranks, False, features, torch.float32)
        around = call.messages
        assert isinstance(around, Around)
        messages: Around
        known = (None, rank, around.plans, around.sequences)
        if isinstance(around, AroundTogether):
            messages = TogetherInPlace(
                *known, together=around.together, sent=around.sent, held=held, sums=sums
            )
        else:
            rounds = around.rounds, around.returning
            messages = InPlace(
                *(*known, *rounds),
                held=held,
                sums=sums,
                received=received if receives else None,
                regions=regions if receives else {},
                keeps_regions=keeps_regions,
            )
        yield Simulated(replace(call, messages=messages), own, sink_of(asked, 0), places)
