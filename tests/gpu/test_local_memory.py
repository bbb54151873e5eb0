"""Kernels of which a thread keeps a few bytes in local memory, where many features meet.

Which kernels these are is ptxas' choice: what matters is that such a kernel is as right as others.
"""

from __future__ import annotations

import pytest

from . import kv_cache, varlen
from .test_decode import queries
from .test_decode_scores import arguments
from .varlen import Call, Features

pytestmark = pytest.mark.gpu
LENGTHS = (130, 0, 1, 257, 64), (200, 7, 0, 300, 129)
CALLS = [
    Call(
        "bshd", (200, 200), (257, 257), d=256, d_v=48, heads=(4, 2), mask="causal",
        window=(50, 0), dtype="bf16", loose="rows2",
        more=Features(alibi="h", dropout=0.1, bias="pre_scale", bias_shape="bhss"),
    ),
    Call(
        "thd", *LENGTHS, gaps=True, d=128, d_v=96, heads=(4, 2), mask="causal", dtype="fp16",
        loose="start1", more=Features(alibi="bh", bias="post_scale", bias_shape="1hss"),
    ),
    Call(
        "bshd", *LENGTHS, room=(260, 300), d=32, d_v=256, heads=(4, 2), mask="causal",
        window=(50, 0), dtype="fp16", loose="rows2", more=Features(dropout=0.1, seen=0.3),
    ),
]  # fmt: skip
EIGHT_BITS = Call(
    "bshd", *LENGTHS, room=(260, 300), d=96, d_v=256, heads=(4, 2), mask="causal",
    window=(50, 0), dtype="e4m3",
)  # fmt: skip
KERNELS = [call.spec for call in (*CALLS, EIGHT_BITS)]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_crowded_kernel_is_right(call, deterministic):
    varlen.check(call, deterministic=deterministic)


def test_crowded_kernel_of_8_bits_is_right():
    varlen.check_alone(EIGHT_BITS)


@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
def test_crowded_kernel_that_widens_keys_is_right(kv):
    cached = kv_cache.pages([700, 0, 128, 1501], 2, 112, 16, scales="head", kv_dtype=kv)
    choice = ("alibi", "learnable", "max_logit"), "causal"
    kv_cache.check_pages(queries(4, 140, 4, 112), cached, **arguments(choice, 4, 1))
