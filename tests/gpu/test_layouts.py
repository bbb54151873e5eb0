"""Every dense layout on the kernels: packed and mixed, both directions, gradients in place."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, varlen
from .varlen import Call

pytestmark = pytest.mark.gpu

PACKED = ("sb3hd", "sbh3d", "bs3hd", "bsh3d")
PACKED_KV = ("sbhd_sb2hd", "sbhd_sbh2d", "bshd_bs2hd", "bshd_bsh2d")
MIXED = ("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "sbhd", "bhsd")
CALLS = [
    *(Call(name, (200, 200), d=d, mask="causal") for name in PACKED for d in (64, 128, 256)),
    *(Call(name, (130, 130), (333, 333), d=d, heads=(4, 2), mask="causal_bottom_right")
      for name in PACKED_KV for d in (64, 128, 256)),
    *(Call(name, (257, 257, 257), (65, 65, 65), d=128, heads=(6, 2))
      for name in (*MIXED, *PACKED_KV)),
    *(Call(name, (70,), (70,), d=72, d_v=40, mask="causal") for name in MIXED),
]  # fmt: skip
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_layout_both_directions_are_right(call):
    varlen.check(call)


@pytest.mark.parametrize("layout", [*PACKED, *PACKED_KV])
def test_layout_packed_bits_are_those_of_separate_tensors(layout):
    call = Call(layout, (300, 300), d=128, mask="causal")
    operands = call.operands()
    q, k, v = attngen.spec.layouts.unpack(call.parsed, *operands)
    d_o = call.tensor("q", 2, 128, 7)
    lse_shape = (2, 2, 300)
    dlse = oracle.randn(*lse_shape, dtype=torch.float32, seed=3)
    packed = varlen.run(operands, d_o, dlse, **call.arguments(), **{"deterministic": True})
    separate = [x.contiguous() for x in (q, k, v)]
    arguments = {**call.arguments(), "layout": call.parsed.q_format, "deterministic": True}
    out, lse, gradients = varlen.run(separate, d_o, dlse, **arguments)
    assert oracle.same(packed[:2], (out, lse))
    named = iter(packed[2])
    carriers = [None if x is None else next(named) for x in operands]
    assert oracle.same(attngen.spec.layouts.unpack(call.parsed, *carriers), gradients)


def test_layout_packed_strides_that_the_copy_engine_cannot_take_are_right():
    qkv = oracle.randn(2, 9, 3, 2, 68)[..., :64]
    out = attngen.attention(qkv, layout="bs3hd", backend="cuda")
    oracle.check(out, None, oracle.truth(*qkv.unbind(2)))
