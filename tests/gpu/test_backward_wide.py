"""Head dims above 256: a backward whose CTAs have half of the columns each, against float64."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, test_callables, varlen
from .varlen import Call, Features

pytestmark = pytest.mark.gpu

CALLS = [
    Call("bshd", (130,), (200,), d=512, heads=(2, 1)),
    Call("bshd", (200, 200), d=512, mask="causal"),
    Call("bhsd", (130,), (70,), d=320, d_v=320, mask="causal_bottom_right", dtype="fp16"),
    Call("sbhd", (140,), (190,), d=384, mask="causal", window=(70, 0)),
    Call("bshd", (65,), (127,), d=512, d_v=448, window=(5, 90), heads=(4, 2)),
    Call("bshd", (70,), (130,), d=264, d_v=72),
    Call("bshd", (130, 130), d=512, d_v=64, mask="causal"),
    Call("bshd", (70,), (130,), d=300, d_v=7, heads=(2, 1)),
    Call("bshd", (290, 290), d=512, heads=(6, 2), mask="causal"),
    Call("bshd", (1,), (300,), d=128, d_v=448),
    Call("bshd", (300,), (65,), d=64, d_v=264, heads=(4, 4)),
    Call("bshd", (70,), (90,), d=7, d_v=320),
    Call("thd", (0, 1, 0, 64), (5, 0, 0, 65), d=512, heads=(2, 1), mask="causal"),
    Call("thd", (70, 0, 130), (7, 30, 200), gaps=True, d=512, mask="causal_bottom_right",
         more=Features("h", softmax="learnable")),
    Call("bshd", (130, 40), (77, 130), room=(130, 140), d=320, heads=(4, 2), mask="padding_causal",
         more=Features(softcap=1.5)),
    Call("bshd", (130,), (200,), d=300, d_v=77, heads=(2, 1), more=Features(dropout=0.1)),
    Call("sbhd", (130,), (77,), d=512, loose="rows2", mask="causal", more=Features(seen=0.5)),
    Call("bshd", (130,), (200,), d=512, heads=(2, 1), mask="causal",
         more=Features(bias="post_scale", bias_shape="1hss", dropout=0.1)),
    Call("bshd", (70,), (70,), d=384, more=Features("", 2.0, seen=0.5, bias="pre_scale")),
    # Where registers are short: fewer queries a block, or what follows from rows made anew.
    Call("thd", (100, 20), (90, 60), d=512, d_v=64, mask="causal", more=Features("h", softcap=1.5)),
    Call("bshd", (90,), (130,), d=512, d_v=128, heads=(2, 1), more=Features("", 2.0, dropout=0.1)),
    Call("bshd", (70, 40), (90, 77), room=(80, 90), d=512, d_v=448, loose="rows2",
         mask="padding_causal", heads=(2, 1),
         more=Features("", 2.0, "learnable", 0.1, 0.5, bias="pre_scale")),
]  # fmt: skip
KERNELS = [*dict.fromkeys(call.spec for call in CALLS)]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_of_wide_heads_are_right(call):
    varlen.check(call)


@pytest.mark.parametrize("call", [CALLS[1], CALLS[10]], ids=str)
def test_deterministic_gradients_of_wide_heads_are_the_same_each_time(call):
    varlen.check(call, deterministic=True)


def test_gradients_of_wide_heads_under_callables_are_right():
    def mask_mod(b, h, i, j):
        return (i // 70 == j // 70) | (j < 3) & (h == 1)

    q, k, v = oracle.operands(1, test_callables.HEADS, 2, 90, 110, 320)
    test_callables.check((q, k, v), test_callables.relative(oracle.DEVICE), mask_mod=mask_mod)


def test_gradients_of_what_scores_of_wide_heads_learn_are_right():
    test_callables.check_learned("heads and rows", 512, mask="causal_bottom_right")


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_gradients_of_wide_heads_of_many_tiles_are_right_and_runs_agree(mask):
    operands = [x.requires_grad_() for x in oracle.operands(2, 8, 2, 1500, 2100, 512)]
    d_o = oracle.randn(2, 1500, 8, 512, seed=5)

    def gradients():
        out = attngen.attention(*operands, mask=mask, backend="cuda")
        return torch.autograd.grad(out, operands, d_o)

    first = gradients()
    expected = attngen.reference.attention(*(x.detach().float() for x in operands), mask=mask)
    assert expected[0].shape == d_o.shape
    assert all(oracle.same(first, gradients()) for _ in range(10))
