"""Ranks of a group, one after another on one GPU: their kernels' parts are one call's results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
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
from attngen.frontends.pytorch.context_function import ContextAttention
from attngen.frontends.pytorch.context_messages import Around, Finish, Pair, Visit
from attngen.reference import dropout_keep_mask

from . import gradients, oracle

pytestmark = pytest.mark.gpu
STATE = (0x123456789ABCDEF, 2**40 + 5)
DROPPED = {"dropout_p": 0.2, "alibi_slopes": True}
# An order, the length of sequences, and what the call says.
CASES = [
    (Order("dual_chunk", 2), 192, {"mask": "causal"}),
    (Order("dual_chunk", 3), 126, {"mask": "causal", **DROPPED}),
    (Order("contiguous", 3), 150, {"window": (60, 7)}),
    (Order("striped", 2), 128, {"mask": "causal"}),
]


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


def simulated(
    order: Order, operands: list[Tensor], given: dict[str, Any], d_out: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, LSE and the gradients of q, k and v, by all ranks in turn."""
    room = operands[0].shape[1]
    index = [torch.tensor(order.shard(r, [room]), device=oracle.DEVICE) for r in range(order.ranks)]
    leaves = [[x[:, own].contiguous().requires_grad_() for x in operands] for own in index]
    held = [(k.detach(), v.detach()) for _, k, v in leaves]
    sent: list[tuple[int, Pair]] = []
    outs, lses, made = [], [], []
    for rank, (q, k, v) in enumerate(leaves):
        asked = asked_of(q, k, v, {**given, "backend": "cuda"}, order.ranks)
        features = features_of(asked, given.get("rng_state"), 0, q.shape[2])
        call = context_call(
            asked, order, Ranks(None, order.ranks, rank), False, features, torch.float32
        )
        around = call.messages
        assert isinstance(around, Around)
        messages = InPlace(None, rank, around.plans, around.sequences, held, sent)
        call = replace(call, messages=messages)
        out, lse = ContextAttention.apply(call, q, k, v, sink_of(asked, 0), None)
        made.append([*torch.autograd.grad(out, [q, k, v], d_out[:, index[rank]])])
        outs.append(out.detach())
        lses.append(lse.detach())
    for source, (dk, dv) in sent:
        _, own_dk, own_dv = made[source]
        made[source][1:] = [own_dk + dk, own_dv + dv]
    back = torch.tensor(order.unshard([room]), device=oracle.DEVICE)
    whole = [torch.cat(x, 1)[:, back].to(d_out.dtype) for x in zip(*made, strict=True)]
    return torch.cat(outs, 1)[:, back], torch.cat(lses, 2)[..., back], whole


@pytest.mark.parametrize(("order", "room", "given"), CASES, ids=str)
def test_ranks_in_turn_are_one_call(order, room, given):
    q, k, v = oracle.operands(1, 2, 1, room, room, 64, 64, torch.bfloat16)
    d_out = oracle.randn(*q.shape, dtype=q.dtype, seed=9)
    if "dropout_p" in given:
        given = {**given, "rng_state": torch.tensor(STATE, device=oracle.DEVICE)}
    out, lse, found = simulated(order, [q, k, v], given, d_out)
    oracle.check(out, lse, oracle.truth(q, k, v, **given))
    gradients.check(found, [q, k, v, d_out], None, **given)


def test_ranks_drop_what_one_call_drops():
    """Scores of 0 and one-hot values: the output is the mask; chunks of 15 positions."""
    room, heads = 60, 2
    q, k = (torch.zeros(1, room, heads, 64, dtype=torch.bfloat16, device=oracle.DEVICE),) * 2
    unit = torch.eye(room, 64, dtype=torch.bfloat16, device=oracle.DEVICE)
    v = unit[None, :, None].expand_as(k).contiguous()
    state = torch.tensor(STATE, device=oracle.DEVICE)
    given = {"dropout_p": 0.5, "rng_state": state}
    out, _, _ = simulated(Order("dual_chunk", 2), [q, k, v], given, torch.ones_like(q))
    mask = dropout_keep_mask(state, 0.5, 1, heads, room, room)
    assert torch.equal(out.permute(0, 2, 1, 3)[..., :room] > 0, mask)
