"""dS that is left in memory, of which dQ is made: gradients are right, in rounds of heads, too."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen.call import kept_ds

from . import oracle, varlen
from .varlen import Call, Features

pytestmark = [pytest.mark.gpu, pytest.mark.wgmma]
CALLS = [
    Call("bshd", (130,), (200,), d=256, heads=(2, 1)),
    Call("bshd", (200, 200), d=256, mask="causal"),
    Call("bhsd", (330,), (170,), d=256, d_v=160, heads=(2, 1), mask="causal_bottom_right"),
    Call("bhsd", (170,), (330,), d=160, d_v=256, heads=(2, 2), mask="causal", dtype="fp16"),
    Call("bshd", (230,), (300,), d=192, d_v=128, heads=(2, 1), mask="causal"),
    Call("sbhd", (340,), (390,), d=200, mask="causal", window=(70, 0)),
    Call("bshd", (265,), (127,), d=256, window=(5, 90), heads=(4, 2)),
    Call("bshd", (600,), (127,), d=256, window=(40, 10)),
    Call("bshd", (170,), (130,), d=136, d_v=72),
    Call("bshd", (1,), (300,), d=256),
    Call("bshd", (300,), (1,), d=192, mask="causal_bottom_right"),
    Call("bshd", (130,), (200,), d=256, heads=(2, 1), more=Features(dropout=0.1)),
    Call("bshd", (130,), (200,), d=256, heads=(2, 1), mask="causal_bottom_right",
         more=Features("h", softcap=1.5, softmax="learnable")),
    Call("bshd", (230,), (300,), d=256, heads=(2, 1), more=Features(seen=0.5)),
    Call("bshd", (230,), (300,), d=192, d_v=128, mask="causal",
         more=Features("h", seen=0.3, dropout=0.1)),
    # Two CTAs have half of the columns each, and dQ two parts.
    Call("bshd", (330,), (200,), d=512, heads=(2, 1), mask="causal"),
    Call("bshd", (170,), (130,), d=264, d_v=72),
    Call("bshd", (65,), (300,), d=128, d_v=448),
    Call("bshd", (130,), (200,), d=320, heads=(2, 1), more=Features(dropout=0.1)),
    Call("bhsd", (70,), (90,), d=384, dtype="fp16"),
]  # fmt: skip
ROUNDS = [
    Call("bshd", (230, 230, 230), d=256, heads=(4, 2), mask="causal"),
    Call("bhsd", (130, 130), (200, 200), d=192, d_v=128, heads=(3, 3)),
    Call("bshd", (200, 200), d=512, heads=(4, 2), mask="causal"),
]
KERNELS = [*dict.fromkeys(call.spec for call in (*CALLS, *ROUNDS))]


@pytest.fixture
def rounds(monkeypatch):
    """How many rounds each backward has that is prepared."""
    found = []
    find = kept_ds.kept_by

    def noted(kernels, extents):
        kept = find(kernels, extents)
        found.append(len(kept.rounds))
        return kept

    monkeypatch.setattr(kept_ds, "kept_by", noted)
    return found


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_of_kept_gradients_of_scores_are_right(call, rounds):
    varlen.check(call)
    assert not rounds or {*rounds} == {1}  # a call of the same form may have been prepared before


@pytest.mark.parametrize("call", ROUNDS, ids=str)
def test_gradients_are_right_in_rounds_of_heads(call, rounds, monkeypatch):
    monkeypatch.setattr(kept_ds, "MOST_BYTES", 500_000)
    varlen.check(call)
    assert rounds and min(rounds) > 1


def test_heads_of_too_many_scores_have_them_made_anew(rounds, monkeypatch):
    monkeypatch.setattr(kept_ds, "MOST_BYTES", 50_000)
    varlen.check(Call("bshd", (130,), (210,), d=256, heads=(2, 1)))
    assert rounds and {*rounds} == {0}


def test_gradients_of_keys_and_values_alone_keep_nothing(rounds):
    q, k, v = oracle.operands(1, 2, 1, 90, 110, 256)
    out = attngen.attention(q, *(x.requires_grad_() for x in (k, v)), backend="cuda")
    d_o = oracle.randn(*out.shape, seed=5)
    found = torch.autograd.grad(out, (k, v), d_o)
    copies = [x.detach().double().requires_grad_() for x in (k, v)]
    made, _ = attngen.reference.attention(q.double(), *copies)
    wanted = torch.autograd.grad(made, copies, d_o.double())
    assert rounds and {*rounds} == {0}
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() < 0.02 * y.norm()
