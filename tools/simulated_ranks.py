"""Ranks of a group in one process, one after another, for checks and times on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attngen.call.context_order import Order
from attngen.frontends.pytorch.context_calls import (
    Ranks,
    asked_of,
    context_call,
    features_of,
    sink_of,
)
from attngen.frontends.pytorch.context_function import ContextAttention, ContextCall
from attngen.frontends.pytorch.context_messages import Around, Finish, Pair, Visit


@dataclass(frozen=True, eq=False)
class InPlace(Around):
    """Keys of ranks that are all at hand; gradients that are sent are kept.

    held: of every rank; sent: a rank, and gradients of its keys.
    """

    held: list[Pair] = field(default_factory=list)
    sent: list[tuple[int, Pair]] = field(default_factory=list)

    def _fetch(self, number: int, k: Tensor, v: Tensor) -> Any:
        source = (self.rank - number) % len(self.plans)
        step = self.plans[self.rank][number % len(self.plans)]
        spans = self._spans(self.rank, number % len(self.plans))
        return lambda: Visit(step.parts, spans, self._cut(*self.held[source], spans))

    def returns(self, number: int, made: Any, dtype: torch.dtype) -> Finish:
        if number == 0:
            return super().returns(number, made, dtype)
        source = (self.rank - number) % len(self.plans)
        k, v = self.held[source]
        sums = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        self._add(sums, self._spans(self.rank, number), made)
        self.sent.append((source, sums))
        return lambda _: None


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
    sent: list[tuple[int, Pair]],
) -> Iterator[Simulated]:
    """The ranks of a call over [1, s, h, d], by kernels. sent: where they leave gradients of keys
    that others hold."""
    q, *_ = operands
    room, device = q.shape[1], q.device
    index = [torch.tensor(order.shard(r, [room]), device=device) for r in range(order.ranks)]
    leaves = [[x[:, own].contiguous().requires_grad_() for x in operands] for own in index]
    held = [(k.detach(), v.detach()) for _, k, v in leaves]
    for rank, (own, places) in enumerate(zip(leaves, index, strict=True)):
        own_q, own_k, own_v = own
        asked = asked_of(own_q, own_k, own_v, {**given, "backend": "cuda"}, order.ranks)
        features = features_of(asked, given.get("rng_state"), 0, q.shape[2])
        ranks = Ranks(None, order.ranks, rank)
        call = context_call(asked, order, ranks, False, features, torch.float32)
        around = call.messages
        assert isinstance(around, Around)
        messages = InPlace(None, rank, around.plans, around.sequences, held, sent)
        yield Simulated(replace(call, messages=messages), own, sink_of(asked, 0), places)
