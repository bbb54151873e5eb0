"""Tiles of keys in waves, where query heads share keys under a causal mask: gradients of tiles that
visit blocks of queries from the first on or from the last, in any order of additions or in one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attngen.kernels.plan import plans
from attngen.spec.problem import Problem

from . import gradients, oracle, varlen
from .varlen import Call, Features

pytestmark = pytest.mark.gpu

# Of 128 keys a tile: a head has more tiles than the emulator's CTAs, as many, or fewer.
DENSE = [
    Call("bshd", (1100,), d=64, heads=(4, 2), mask="causal"),  # two waves a head
    Call("sbhd", (1650,), d=64, heads=(2, 1), mask="causal"),  # three
    Call("bhsd", (600,), d=64, heads=(6, 2), mask="causal"),  # one
    Call("bshd", (250, 250), d=64, heads=(16, 2), mask="causal"),  # a wave of two heads
    Call("bshd", (700,), d=128, heads=(6, 2), mask="causal"),
    Call("bshd", (500, 500), d=128, heads=(8, 1), mask="causal"),
    Call("bshd", (700,), (1400,), d=64, heads=(4, 2), mask="causal_bottom_right"),
    Call("bshd", (1400,), (700,), d=128, heads=(2, 1), mask="causal_bottom_right"),
    Call("bshd", (500,), (1400,), d=64, heads=(4, 2), mask="causal"),  # keys that no query sees
]
# A head alone: short ones are in waves, too, unless additions have an order, long ones are not.
ALONE = [
    Call("bshd", (1100,), d=64, heads=(2, 2), mask="causal"),
    Call("bshd", (2060,), d=64, heads=(1, 1), mask="causal"),
]
# So many sequences of one length come in any order of their own, which a kernel before finds.
EQUAL = Call("thd", (200, 0) * 20, d=64, heads=(2, 1), mask="causal")
PACKED = [
    Call("thd", (900, 0, 300, 130, 1), gaps=True, d=64, heads=(4, 2), mask="causal"),
    Call("thd", (600, 0, 520, 7), (520, 130, 700, 0), d=128, heads=(3, 1),
         mask="causal_bottom_right"),
    Call("thd", (500, 0, 300), gaps=True, d=64, heads=(16, 2), mask="causal"),
    EQUAL,
]  # fmt: skip
PADDED = [
    Call("bshd", (900, 0, 500), (1000, 130, 400), room=(900, 1100), d=64, heads=(2, 1),
         mask="padding_causal"),
    Call("bshd", (600, 390), (520, 700), room=(600, 700), d=128, heads=(2, 1),
         mask="padding_causal_bottom_right"),
]  # fmt: skip
FEATURES = [
    Call("bshd", (520,), d=128, heads=(4, 2), mask="causal", more=Features(dropout=0.1)),
    Call("bshd", (520,), d=128, heads=(4, 2), mask="causal", more=Features(alibi="h")),
    Call("bshd", (520,), d=128, heads=(4, 2), mask="causal", more=Features(softcap=1.5)),
    Call("bshd", (520,), d=128, heads=(4, 2), mask="causal", more=Features(seen=0.7)),
]
OF_ANY_ORDER = [  # with one, other kernels serve them
    Call("bshd", (700,), d=64, heads=(2, 2), mask="causal", more=Features(dropout=0.1)),
    Call("thd", (600, 0, 300), d=128, heads=(2, 1), mask="causal", more=Features(dropout=0.3)),
    Call("bshd", (520,), d=128, heads=(4, 2), mask="causal", loose="rows1"),
]
CALLS = [*DENSE, *ALONE, *PACKED, *PADDED, *FEATURES, *OF_ANY_ORDER]
ORDERED = [*DENSE, *ALONE[:1], *PACKED[:3], *PADDED, *FEATURES]
# So many that the waves of a whole GPU's CTAs turn.
MANY = [
    Call("bshd", (2100,), d=64, heads=(16, 8), mask="causal"),
    Call("bshd", (2100,), d=128, heads=(16, 4), mask="causal"),
    Call("thd", (2100, 0, 1100, 700, 1), gaps=True, d=128, heads=(8, 4), mask="causal"),
    Call("bshd", (300,), (17200,), d=128, heads=(2, 1), mask="causal_bottom_right"),
]
KERNELS = list(dict.fromkeys(call.spec for call in (*CALLS, *MANY)))


def name(call: Call) -> str:
    return f"{call}-h{call.heads[0]}x{call.heads[1]}"


def problems() -> list[Problem]:
    """Backwards that tests launch."""
    return [each for spec in KERNELS for each in gradients.backwards_of(spec)]


@pytest.fixture(scope="module", autouse=True)
def heads_together() -> Iterator[None]:
    """Few tiles or not, a tile visits the queries of all heads that share its keys."""
    with oracle.heads_apart(False):
        yield


def test_waves_are_those_of_every_call_here_but_of_lengths_in_an_order():
    for call in (*CALLS, *ORDERED, *MANY):
        for problem in gradients.backwards_of(call.spec)[: 1 + (call in ORDERED)]:
            (fused,) = (each for each in plans(problem, "sm_90a") if hasattr(each, "waves"))
            assert fused.waves != (problem.varlen and problem.deterministic), call


@pytest.mark.parametrize("call", CALLS, ids=name)
def test_waves_gradients_are_those_of_float64(call):
    varlen.check(call)


@pytest.mark.parametrize("call", ORDERED, ids=name)
def test_waves_with_an_order_of_additions_are_right_and_repeat_bit_for_bit(call):
    varlen.check(call, deterministic=True)


def test_waves_of_equal_sequences_in_any_order_repeat_bit_for_bit():
    operands, d_o = EQUAL.operands(), EQUAL.tensor("q", 2, 64, 7)
    dlse = oracle.randn(2, d_o.shape[0], dtype=torch.float32, seed=9)
    arguments = {**EQUAL.arguments(), "deterministic": True}
    _, _, first = varlen.run(operands, d_o, dlse, **arguments)
    for _ in range(3):
        assert oracle.same(varlen.run(operands, d_o, dlse, **arguments)[2], first)


@pytest.mark.device
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("call", MANY, ids=name)
def test_waves_of_a_whole_gpu_give_right_gradients(call, deterministic):
    varlen.check(call, deterministic=deterministic)
