"""Dense formats with lengths of their own: nothing of the padding is read into a result."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, varlen
from .varlen import Call

pytestmark = pytest.mark.gpu

USED, KEYS = (0, 1, 130, 64, 200), (7, 0, 130, 300, 129)
MASKS = (
    {"mask": "padding"},
    {"mask": "padding_causal"},
    {"mask": "padding_causal_bottom_right"},
    {"mask": "none", "window": (30, 5)},
)
CALLS = [
    *(Call(layout, USED, KEYS, room=(200, 310), d=d, heads=(4, 2), **mask)
      for d, layout in ((64, "bshd"), (128, "sbhd"), (256, "bhsd"), (128, "bshd_sbhd_sbhd"))
      for mask in MASKS),
    *(Call(layout, USED, room=(260, 260), d=128, mask="padding_causal")
      for layout in ("bs3hd", "sb3hd", "bsh3d", "sbh3d")),
    *(Call(layout, USED, KEYS, room=(256, 384), d=64, mask="padding", cumulative=True)
      for layout in ("bshd_bs2hd", "sbhd_sbh2d")),
    Call("bshd", USED, KEYS, room=(201, 311), d=192, d_v=128, mask="padding_causal"),
    Call("bshd", (0, 0), (0, 5), room=(130, 140), d=64, mask="padding"),
    *(Call(layout, 8 * USED, 8 * KEYS, room=(200, 310), d=d, heads=(4, 2), mask="padding_causal")
      for d, layout in ((64, "bshd"), (128, "sbhd"), (256, "bhsd"))),
]  # fmt: skip
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_padding_both_directions_are_right(call):
    varlen.check(call)


@pytest.mark.parametrize("side", ["q", "kv"])
def test_padding_lengths_of_one_side_leave_the_other_whole(side):
    q, k, v = oracle.operands(3, 2, 2, 200, 200, 128)
    lengths = {f"seqused_{side}": varlen.int32((0, 77, 200))}
    oracle.check_call(q, k, v, mask="causal", **lengths)


def test_padding_with_full_lengths_gives_the_bits_of_the_dense_kernel():
    # Longer than short calls, which have a kernel of their own where lengths are dense.
    q, k, v = oracle.operands(2, 4, 2, 1100, 1200, 128)
    lengths = {"seqused_q": varlen.int32((1100, 1100)), "seqused_kv": varlen.int32((1200, 1200))}
    dense = attngen.attention(q, k, v, mask="causal", backend="cuda")
    used = attngen.attention(q, k, v, mask="padding_causal", backend="cuda", **lengths)
    assert torch.equal(dense, used)


@pytest.mark.parametrize("d_v", [136, 192, 248])
def test_padding_of_a_partial_output_clears_nothing_else(d_v):
    q, k, v = oracle.operands(2, 3, 3, 70, 90, 64, d_v)
    lengths = {"seqused_q": varlen.int32((40, 70))}
    with oracle.nan_filled_allocations():
        out, lse, *_ = torch.ops.attngen.forward(q, k, v, **lengths, out_dtype="float32")
    oracle.check(out, lse, oracle.truth(q, k, v, **lengths))
