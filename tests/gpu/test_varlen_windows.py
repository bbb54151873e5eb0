"""Windows beside lengths that vary: rows visit blocks of their own, and narrow ones add up dQ in an
order though nobody asks for it."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, varlen
from .varlen import Call, Features

pytestmark = pytest.mark.gpu

# Of a tile and more than one, shorter than any window, and none.
QUERIES, KEYS = (700, 0, 1, 300, 64, 129), (650, 5, 0, 420, 700, 64)
NARROW, WIDE = {"mask": "causal", "window": (40, 0)}, {"mask": "none", "window": (300, 90)}
MASKS = (
    NARROW,
    WIDE,
    {"mask": "causal_bottom_right", "window": (200, 0)},
    {"mask": "none", "window": (0, 100), "bottom_right": True},
)
MORE = (
    Features(softcap=5.0),
    Features(alibi="bh"),
    Features(softcap=8.0, alibi="h", softmax="learnable"),
    Features(softmax="off_by_one", max_logit=True),
)
PACKED = {"layout": "thd", "gaps": True}
USED = {"room": (720, 710)}
CALLS = [
    *(Call(q_lens=QUERIES, kv_lens=KEYS, d=d, heads=(4, 2), **mask, **PACKED)
      for d in (64, 128, 256) for mask in MASKS),
    *(Call("bshd", QUERIES, KEYS, d=d, heads=(4, 1), **mask, **USED)
      for d in (64, 128) for mask in MASKS[:2]),
    *(Call(q_lens=QUERIES, kv_lens=KEYS, d=d, heads=(2, 2), more=more, **mask, **PACKED)
      for d, mask in ((64, NARROW), (128, NARROW), (256, WIDE)) for more in MORE),
    *(Call("sbhd", QUERIES, KEYS, d=d, d_v=d_v, dtype="fp16", more=more, **NARROW, **USED)
      for d, d_v, more in ((128, 96, MORE[0]), (192, 128, MORE[2]), (32, 32, MORE[1]))),
    *(Call(q_lens=QUERIES, kv_lens=KEYS, d=128, loose="start1", more=MORE[0], **NARROW, **lengths)
      for lengths in (PACKED, {"layout": "bshd", **USED})),
    Call("thd", QUERIES, d=128, heads=(2, 1), mask="causal", window=(1 << 20, 0)),
    Call("thd", (0, 300, 0), (130, 0, 0), d=64, window=(50, 5)),
    Call("thd", 7 * QUERIES, d=64, **NARROW),
]  # fmt: skip
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_window_beside_lengths_is_right_both_ways(call):
    varlen.check(call)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("layout", [PACKED, {"layout": "bshd", **USED}], ids=["packed", "used"])
def test_window_deterministic_beside_lengths_gives_right_and_equal_bits(d, layout):
    call = Call(q_lens=QUERIES, kv_lens=KEYS, d=d, heads=(4, 2), **WIDE, **layout)
    varlen.check(call, deterministic=True)


@pytest.mark.parametrize("d", [64, 128])
def test_schedule_of_a_narrow_window_serves_a_wide_one(d):
    """How many heads its tiles take together is the window's that came first."""
    call = Call("thd", 7 * QUERIES, 7 * KEYS, d=d, heads=(4, 2), mask="causal")
    narrow, wide = ({**call.arguments(), "window": (keys, 0)} for keys in (40, 600))
    lengths = {name: x for name, x in narrow.items() if name.startswith("cu_seqlens")}
    operands, d_o = call.operands(), call.tensor("q", 4, d, 7)
    dlse = torch.zeros(4, d_o.shape[0], device=oracle.DEVICE)

    def run(arguments, schedule=None):
        given = {**arguments, **lengths, "deterministic": True, "schedule": schedule}
        return varlen.run(operands, d_o, dlse, **given)

    schedule = attngen.Schedule()
    for arguments in (narrow, wide, narrow):
        (*found, gradients), (*wanted, expected) = run(arguments, schedule), run(arguments)
        assert oracle.same(found, wanted) and oracle.same(gradients, expected)
