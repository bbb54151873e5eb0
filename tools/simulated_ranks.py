"""Ranks of a group in one process, one after another, for checks and times on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attngen.call.context_order import Order
from attngen.call.context_rounds import Region
from attngen.call.context_steps import Span
from attngen.frontends.pytorch.context_calls import (
    Ranks,
    asked_of,
    context_call,
    features_of,
    sink_of,
)
from attngen.frontends.pytorch.context_function import ContextAttention, ContextCall
from attngen.frontends.pytorch.context_messages import (
    Around,
    Finish,
    Pair,
    Visit,
    message_of,
    tokens_of,
)


@dataclass(frozen=True, eq=False)
class InPlace(Around):
    """Keys of ranks that are all at hand, and sums of the gradients that are sent to each.

    held: of every rank; sums: of gradients that others make of its keys.
    """

    held: list[Pair] = field(default_factory=list)
    sums: list[Pair] = field(default_factory=list)
    regions: dict[int, Pair] = field(default_factory=dict)  # with what came once, by identity
    keeps_regions: bool = True

    def room(self, region: Region, k: Tensor, v: Tensor) -> Pair:
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

    def ask(self, steps: Sequence[int], own: Pair, rooms: Mapping[int, Pair]) -> list[Any]:
        return []

    def give(
        self, steps: Sequence[int], made: Mapping[int, Pair], like: Pair, dtype: torch.dtype
    ) -> tuple[list[Any], list[tuple[Span, Pair]]]:
        for number in made:  # each rank receives as much as it sends, in the mean
            _, source = self.around(number)
            (span,) = self.spans(self.rank, number)
            for total, x in zip(self.sums[source], made[number], strict=True):
                total[:, span.begin : span.end].add_(x.to(dtype).transpose(0, 1))
        return [], []

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


@dataclass(frozen=True, eq=False)
class Simulated:
    """A rank: its call, its operands, which learn, and its score of each head that no key has."""

    call: ContextCall
    leaves: list[Tensor]
    sink: Tensor | None
    index: Tensor

    def run(self) -> tuple[Tensor, Tensor]:
        """Its output and LSE."""
        out, lse = ContextAttention.apply(self.call, *self.leaves, self.sink, None)  # type: ignore[no-untyped-call]
        return out, lse


def ranks_of(
    order: Order,
    operands: list[Tensor],
    given: dict[str, Any],
    sums: list[Pair],
    keeps_regions: bool = True,
) -> Iterator[Simulated]:
    """The ranks of a call over [1, s, h, d], by kernels. sums: an empty list, which gets float32
    tensors to which they add gradients of keys that others hold, two for each of these.
    keeps_regions: whether keys that come are copied once, which takes later runs no time."""
    q, *_ = operands
    room, device = q.shape[1], q.device
    index = [torch.tensor(order.shard(r, [room]), device=device) for r in range(order.ranks)]
    leaves = [[x[:, own].contiguous().requires_grad_() for x in operands] for own in index]
    held = [(k.detach(), v.detach()) for _, k, v in leaves]
    for k, v in held:
        sums.append((torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v).float()))
    for rank, (own, places) in enumerate(zip(leaves, index, strict=True)):
        own_q, own_k, own_v = own
        asked = asked_of(own_q, own_k, own_v, {**given, "backend": "cuda"}, order.ranks)
        features = features_of(asked, given.get("rng_state"), 0, q.shape[2])
        ranks = Ranks(None, order.ranks, rank)
        call = context_call(asked, order, ranks, False, features, torch.float32)
        around = call.messages
        assert isinstance(around, Around)
        messages = InPlace(
            None,
            rank,
            around.plans,
            around.sequences,
            around.rounds,
            around.returning,
            held=held,
            sums=sums,
            keeps_regions=keeps_regions,
        )
        yield Simulated(replace(call, messages=messages), own, sink_of(asked, 0), places)
