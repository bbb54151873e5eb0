"""Scores, sinks, dropout and arbitrary masks beside variable lengths and each other, both ways."""

from __future__ import annotations

import itertools

import pytest

from . import varlen
from .varlen import Call, Features

pytestmark = pytest.mark.gpu
Q_LENS, KV_LENS = (130, 0, 1, 257, 64), (200, 7, 0, 300, 129)
FEATURES = (
    Features(alibi="bh", softmax="learnable", max_logit=True),
    Features(softcap=30.0, softmax="off_by_one"),
    Features(dropout=0.1),
    Features(seen=0.3),
    Features("default", 1.5, "learnable", dropout=0.25, seen=0.6, max_logit=True),
)
DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
MASKS = (("none", (-1, -1)), ("causal", (-1, -1)), ("causal_bottom_right", (40, 0)))


def calls() -> list[Call]:
    """Every feature beside every kind of length; head dims and masks take turns."""
    found = []
    kinds = itertools.product(FEATURES, ("packed", "used", "dense"), (0, 1))
    for number, (more, kind, turn) in enumerate(kinds):
        (d, d_v), (mask, window) = DIMS[(number // 2 + turn) % 4], MASKS[number % 3]
        lengths = {
            "packed": {"layout": "thd", "q_lens": Q_LENS, "kv_lens": KV_LENS, "gaps": turn == 0},
            "used": {"layout": ("bshd", "sbhd")[turn], "q_lens": Q_LENS, "kv_lens": KV_LENS,
                     "room": (260, 300)},
            "dense": {"layout": "bhsd", "q_lens": (200, 200), "kv_lens": (257, 257)},
        }[kind]  # fmt: skip
        found.append(
            Call(
                **lengths,
                d=d,
                d_v=d_v,
                heads=(4, 2),
                mask=mask,
                window=window,
                dtype=("bf16", "fp16")[number % 2],
                more=more,
            )  # fmt: skip
        )
    return found


CALLS = calls()
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_features_beside_lengths_are_right(call):
    varlen.check(call)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS[-6::2], ids=str)
def test_features_beside_lengths_repeat_bit_for_bit_where_they_should(call):
    varlen.check(call, deterministic=True)
