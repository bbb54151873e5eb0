"""Ranks of a group, one after another on one GPU: their kernels' parts are one call's results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attngen
from attngen import fp8, parallel
from attngen.call.context.order import Order
from attngen.call.context.steps import Span
from attngen.frontends.pytorch.context import plans as context_plans
from attngen.frontends.pytorch.context.calls import Ranks, asked_of, context_call, features_of
from attngen.frontends.pytorch.context.function import ContextAttention
from attngen.frontends.pytorch.context.messages import Gathered, Visit
from attngen.frontends.pytorch.context.parts import Stored
from attngen.reference import dropout_keep_mask
from tools.simulated_ranks import ranks_of

from . import gradients, oracle

pytestmark = pytest.mark.gpu
STATE = (0x123456789ABCDEF, 2**40 + 5)
DROPPED = {"dropout_p": 0.2, "alibi_slopes": True}
# An order, the length of sequences, and what the call says.
CASES = [
    (Order("dual_chunk", 2), 512, {"mask": "causal"}),  # whole blocks of queries in each part
    (Order("dual_chunk", 3), 126, {"mask": "causal", **DROPPED}),
    (Order("contiguous", 3), 150, {"window": (60, 7)}),
    (Order("striped", 2), 128, {"mask": "causal", "softmax": "off_by_one"}),
]


def simulated(
    order: Order, operands: list[Tensor], given: dict[str, Any], d_out: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, LSE and the gradients of q, k and v, by all ranks in turn."""
    sums: list[Any] = []
    outs, lses, made = [], [], []
    for rank in ranks_of(order, operands, given, sums):
        out, lse = rank.run()
        made.append([*torch.autograd.grad(out, rank.leaves, d_out[:, rank.index])])
        outs.append(out.detach())
        lses.append(lse.detach())
    for place, (dk, dv) in enumerate(sums):
        _, own_dk, own_dv = made[place]
        made[place][1:] = [own_dk + dk, own_dv + dv]
    back = torch.tensor(order.unshard([operands[0].shape[1]]), device=oracle.DEVICE)
    whole = [torch.cat(x, 1)[:, back].to(d_out.dtype) for x in zip(*made, strict=True)]
    return torch.cat(outs, 1)[:, back], torch.cat(lses, 2)[..., back], whole


@pytest.mark.parametrize(("ranks", "room"), [(2, 512), (4, 1024)])
def test_queries_that_wait_are_one_call(ranks, room, monkeypatch):
    """Most wait for their keys, the last 64 go on, and own keys come last, as where these fill a
    GPU."""
    monkeypatch.setattr(context_plans, "FULL_ROWS", 0)
    monkeypatch.setattr(context_plans, "HIDING", 128)
    test_ranks_in_turn_are_one_call(Order("dual_chunk", ranks), room, {"mask": "causal"})


@pytest.mark.parametrize(("order", "room", "given"), CASES, ids=str)
def test_ranks_in_turn_are_one_call(order, room, given):
    q, k, v = oracle.operands(1, 2, 1, room, room, 64, 64, torch.bfloat16)
    d_out = oracle.randn(*q.shape, dtype=q.dtype, seed=9)
    if "dropout_p" in given:
        given = {**given, "rng_state": torch.tensor(STATE, device=oracle.DEVICE)}
    out, lse, found = simulated(order, [q, k, v], given, d_out)
    oracle.check(out, lse, oracle.truth(q, k, v, **given))
    gradients.check(found, [q, k, v, d_out], None, **given)


# An order, the rooms and lengths of packed sequences, and what the call says.
PACKED = [
    (Order("dual_chunk", 2), (256, 64, 128), (256, 60, 128), {"mask": "causal"}),
    (Order("dual_chunk", 3), (126, 66, 180), (126, 40, 170), {"mask": "causal", **DROPPED}),
    (Order("contiguous", 3), (150, 90), (150, 70), {"window": (60, 7)}),
    (Order("dual_chunk", 2), (128, 32), (70, 32), {"mask": "causal", "softmax": "off_by_one"}),
    (Order("dual_chunk", 2), (192, 64), (192, 50), {"mask": "padding_causal_bottom_right"}),
]


@pytest.mark.parametrize(("order", "rooms", "used", "given"), PACKED, ids=str)
def test_ranks_of_packed_sequences_are_one_call(order, rooms, used, given):
    """Each step of a rank is few launches, whatever the number of sequences."""
    tokens = sum(rooms)
    q, k, v = (x[0] for x in oracle.operands(1, 2, 1, tokens, tokens, 64, 64, torch.bfloat16))
    d_out = oracle.randn(*q.shape, dtype=q.dtype, seed=9)
    ends, starts = (torch.tensor([0, *x]).cumsum(0).int() for x in (used, rooms))
    given = {**given, "layout": "thd"}
    if "dropout_p" in given:
        given["rng_state"] = torch.tensor(STATE, device=oracle.DEVICE)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    lengths |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    sums: list[Any] = []
    outs, lses, made = [], [], []
    for rank in ranks_of(order, [q, k, v], {**given, **lengths}, sums):
        together = rank.call.together
        assert max(map(len, (*together.forward, *together.backward))) <= 2
        out, lse = rank.run()
        made.append([*torch.autograd.grad(out, rank.leaves, d_out[rank.index])])
        outs.append(out.detach())
        lses.append(lse.detach())
    for place, (dk, dv) in enumerate(sums):
        _, own_dk, own_dv = made[place]
        made[place][1:] = [own_dk + dk[0], own_dv + dv[0]]
    back = torch.tensor(order.unshard(rooms), device=oracle.DEVICE)
    found = [torch.cat(x)[back].to(d_out.dtype) for x in zip(*made, strict=True)]
    lengths = {name: x.to(oracle.DEVICE) for name, x in lengths.items()}
    truth = oracle.truth(q, k, v, **given, **lengths)
    oracle.check(torch.cat(outs)[back], torch.cat(lses, 1)[:, back], truth, "thd")
    gradients.check(found, [q, k, v, d_out], None, **given, **lengths)


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


@pytest.fixture
def alone(monkeypatch):
    """A group of one rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class AtHand(Gathered):
    """Keys of all ranks, which a rank has without messages."""

    def visits(self, k, v):
        end = max(part.keys.end for part in self.parts)
        yield Visit(self.parts, [Span(0, end)], [(k[:, :end], v[:, :end])])

    def returns(self, number, made, dtype):
        ((dk, dv),) = made

        def finish(sums):
            for total, x in zip(sums, (dk, dv), strict=True):
                total[:, : x.shape[1]] += x

        return finish


def test_chunks_over_gathered_keys_are_one_call():
    """Two chunks of a rank's queries, which see as many keys as there are up to their ends."""
    room, order, given = 512, Order("dual_chunk", 2), {"mask": "causal"}
    q, k, v = oracle.operands(1, 2, 1, room, room, 64, 64, torch.bfloat16)
    d_out = oracle.randn(*q.shape, dtype=q.dtype, seed=9)
    outs, made = [], []
    for rank in range(2):
        own = torch.tensor(order.shard(rank, [room]), device=oracle.DEVICE)
        leaves = [x.clone().requires_grad_() for x in (q[:, own], k, v)]
        asked = asked_of(*(x[:, own] for x in (q, k, v)), {**given, "backend": "cuda"}, 2)
        features = features_of(asked, None, 0, 2)
        call = context_call(asked, order, Ranks(None, 2, rank), True, features, torch.float32)
        messages = AtHand(**vars(call.messages))
        assert len(messages.parts) == 2 - rank  # chunks 0 and 3, or 1 and 2
        out, _ = ContextAttention.apply(replace(call, messages=messages), *leaves, None, None)
        outs.append(out.detach())
        made.append(torch.autograd.grad(out, leaves, d_out[:, own]))
    back = torch.tensor(order.unshard([room]), device=oracle.DEVICE)
    dq, dk, dv = zip(*made, strict=True)
    oracle.check(torch.cat(outs, 1)[:, back], None, oracle.truth(q, k, v, **given))
    found = [torch.cat(dq, 1)[:, back], sum(dk), sum(dv)]
    gradients.check(found, [q, k, v, d_out], None, **given)


@pytest.mark.usefixtures("alone")
def test_stored_operands_have_the_results_of_one_call():
    """One rank: a part of FP8 numbers forward, and of what they stand for backward."""
    q, k, v = oracle.operands(1, 4, 2, 128, 128, 64, 64, torch.bfloat16)
    d_out = oracle.randn(*q.shape, dtype=q.dtype, seed=9)

    def made(attend):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with fp8.autocast():
            out = attend(*leaves, mask="causal", backend="cuda")
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    found, wanted = made(parallel.attention), made(attngen.attention)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).abs().max() <= 2**-7 * want.abs().max()


def test_stored_keys_of_other_ranks_are_one_call(monkeypatch):
    """FP8 parts in rounds, forward: most queries have one part, others have theirs merged."""
    monkeypatch.setattr(context_plans, "FULL_ROWS", 0)
    monkeypatch.setattr(context_plans, "HIDING", 128)
    form, order, given = torch.float8_e4m3fn, Order("dual_chunk", 2), {"mask": "causal"}
    numbers = [x.to(form) for x in oracle.operands(1, 4, 2, 512, 512, 64, 64, torch.bfloat16)]
    unit = torch.ones(1, device=oracle.DEVICE)
    descales = {f"descale_{name}": unit for name in "qkv"}
    outs = []
    for rank in ranks_of(order, [x.bfloat16() for x in numbers], given, []):
        q, k, v = (x.detach().to(form).view(torch.uint8) for x in rank.leaves)
        stored = Stored((q, k, v), form, torch.bfloat16, descales)
        asked = asked_of(*rank.leaves, {**given, "backend": "cuda"}, 2)
        features = features_of(asked, None, 0, 4, stored)
        assert not features.joins
        messages = rank.call.messages
        held = [tuple(x.to(form).view(torch.uint8) for x in pair) for pair in messages.held]
        call = replace(rank.call, stored=stored, features=features)
        call = replace(call, messages=replace(messages, held=held))
        out, _ = ContextAttention.apply(call, *rank.leaves, None, None)
        outs.append(out.detach())
    back = torch.tensor(order.unshard([512]), device=oracle.DEVICE)
    found = torch.cat(outs, 1)[:, back]
    wanted = attngen.attention(*numbers, **given, **descales, out_dtype=torch.bfloat16)
    assert (found - wanted).abs().max() <= 2**-6 * wanted.abs().max()
