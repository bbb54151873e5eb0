"""Sequence lengths: none, one, odd, tile edges, unequal, and very long ones on sampled rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import attngen

from . import cases, oracle

pytestmark = pytest.mark.gpu
KERNELS = [
    *cases.core_specs(64, 128, 256, kinds=("none", "causal", "window")),
    cases.spec(64, partial=True, window=(128, 0)),
    cases.spec(64, mask="causal", window=(128, 0)),
]

EDGES = (1, 2, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193, 255, 257)
UNEQUAL = [(1, 500), (500, 1), (3, 1025), (1025, 3), (64, 1000), (1000, 64), (192, 8), (8, 192)]


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
def test_forward_tile_edges_is_right(d, mask):
    for s_q, s_kv in itertools.product(EDGES[::2] if d == 128 else EDGES[1::2], EDGES[::3]):
        q, k, v = oracle.operands(1, 2, 1, s_q, s_kv, d)
        oracle.check_call(q, k, v, mask=mask)


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("s", EDGES)
def test_forward_equal_lengths_at_tile_edges_is_right(d, s):
    q, k, v = oracle.operands(2, 2, 2, s, s, d)
    oracle.check_call(q, k, v, mask="causal")
    oracle.check_call(q, k, v, window=(s // 2, s // 3))


@pytest.mark.parametrize("lengths", UNEQUAL, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
def test_forward_very_unequal_lengths_is_right(lengths, mask):
    q, k, v = oracle.operands(2, 2, 1, *lengths, 128)
    oracle.check_call(q, k, v, mask=mask)
    oracle.check_call(q, k, v, mask=mask, window=(70, 70) if mask == "none" else (-1, -1))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 5, 5)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
def test_forward_nothing_to_see_returns_zeros_of_the_right_shape(layout, sizes, mask):
    batch, s_q, s_kv = sizes
    q, k, v = oracle.operands(batch, 4, 2, s_q, s_kv, 64, 128, layout=layout)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            q, k, v, layout=layout, mask=mask, backend="cuda", return_lse=True
        )
    assert out.shape == (*q.shape[:-1], 128) and out.dtype == q.dtype
    assert aux.lse.shape == (batch, 4, s_q) and aux.lse.dtype == torch.float32
    assert not out.any() and (aux.lse == float("-inf")).all()


def sample(length: int, count: int = 64) -> torch.Tensor:
    """Rows to check: both ends, and others spread at random."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, length, (count - 4,), generator=generator)
    ends = torch.tensor([0, 1, length - 2, length - 1])
    return torch.cat([ends, rows]).to(oracle.DEVICE)


@pytest.mark.device
def test_forward_128k_tokens_causal_is_right():
    length = 131072
    q, k, v = oracle.operands(1, 1, 1, length, length, 128)
    out, aux = attngen.attention(q, k, v, mask="causal", backend="cuda", return_lse=True)
    oracle.check_rows(out, aux.lse, q, k, v, sample(length), left=None, right=0)


@pytest.mark.device
@pytest.mark.parametrize("mask, window", [("none", (128, 64)), ("causal", (128, -1))])
def test_forward_a_million_tokens_windowed_is_right(mask, window):
    length = 1_000_003
    q, k, v = oracle.operands(1, 1, 1, length, length, 64)
    out, aux = attngen.attention(q, k, v, mask=mask, window=window, backend="cuda", return_lse=True)
    right = 0 if mask == "causal" else window[1]
    oracle.check_rows(out, aux.lse, q, k, v, sample(length), left=window[0], right=right)


@pytest.mark.device
def test_forward_a_million_keys_one_query_is_right():
    q, k, v = oracle.operands(1, 2, 1, 1, 1_000_001, 64)
    oracle.check_call(q, k, v)
    oracle.check_call(q, k, v, mask="causal_bottom_right")


@pytest.mark.device
@pytest.mark.parametrize("partial", [False, True])
def test_forward_output_past_two_to_the_31_elements_is_right(partial):
    length, heads = 1 << 20, 33
    q, k, v = oracle.operands(1, heads, 1, length, length, 64)
    out_dtype = "float32" if partial else None
    out, lse, *_ = torch.ops.attngen.forward(
        q, k, v, softmax_scale=0.125, window_left=128, window_right=0, out_dtype=out_dtype
    )
    assert out.numel() > 1 << 31
    last = slice(heads - 1, heads)
    rows = sample(length)
    views = out[:, :, last], lse[:, last], q[:, :, last]
    oracle.check_rows(*views, k, v, rows, left=128, right=0)
    oracle.check_rows(out[:, :, :1], lse[:, :1], q[:, :, :1], k, v, rows, left=128, right=0)


@pytest.mark.parametrize("length", [1 << 30, (1 << 31) - 1])
def test_forward_more_positions_than_a_kernel_counts_is_refused(length):
    q, k, v = oracle.operands(1, 1, 1, 4, 1, 64)
    with pytest.raises(attngen.LaunchError, match="positions"):
        attngen.attention(q, *(x.expand(1, length, 1, 64) for x in (k, v)), backend="cuda")


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("batch, heads", [(70_000, 1), (1, 70_000), (300, 300)])
def test_forward_batch_times_heads_past_65535_is_right(mask, batch, heads):
    q, k, v = oracle.operands(batch, heads, heads, 5, 9, 64)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, mask=mask, backend="cuda", return_lse=True)
    assert not out.isnan().any() and aux.lse.isfinite().all()
    batches, some = ([*{0, n // 2, n - 1}] for n in (batch, heads))
    picked = [x[batches][:, :, some] for x in (q, k, v)]
    expected = oracle.truth(*picked, mask=mask)
    oracle.check(out[batches][:, :, some], aux.lse[batches][:, some], expected)
