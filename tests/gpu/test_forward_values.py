"""Values: large, tiny, constant and near the dtype's limits; softmax scales; repeatability."""

from __future__ import annotations

import math

import pytest
import torch

import attngen

from . import cases, oracle
from .cases import DTYPES

pytestmark = pytest.mark.gpu
KERNELS = [
    *cases.core_specs(64, 128, 256),
    *(cases.spec(d, None, "fp16", mask) for d in (64, 128, 256) for mask in ("none", "causal")),
]
DIMS = (64, 128, 256)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [100.0, 10.0, 1e-2, 1e-4])
def test_values_scaled_inputs_are_right(d, mask, dtype, factor):
    """x 100 makes scores of 1e4 and rows that are all but one-hot."""
    q, k, v = (x * factor for x in oracle.operands(2, 2, 1, 200, 260, d, dtype=DTYPES[dtype]))
    oracle.check_call(q, k, v, mask=mask)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_values_running_maximum_that_keeps_growing_is_right(d, mask):
    """Keys ever more alike to every query, in both directions: each block rescales, or none."""
    q, k, v = oracle.operands(1, 2, 2, 300, 1000, d)
    growth = torch.linspace(-20, 20, 1000, device=q.device)[None, :, None, None]
    q = (q * 0.1).bfloat16()
    q[..., 0] = 8.0
    for sign in (1, -1):
        grown = k.clone()
        grown[..., :1] = (sign * growth).bfloat16()
        oracle.check_call(q, grown, v, mask=mask)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("step", [0.5, 0.99, 1.01, 3.0])
def test_values_maximum_growing_near_the_lazy_limit_is_right(d, step):
    """Rows whose maxima grow by about 8 in log2 units a block (80 keys, or 128 at 128), where a
    rescale may be put off."""
    keys = 128 if d == 128 else 80
    q, k, v = oracle.operands(1, 1, 1, 128, 640, d)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1.0
    q[:, ::2, :, 0] = 0.25  # neighbouring rows that need no rescale
    blocks = torch.arange(640, device=q.device) // keys
    k[..., 0] = (8 * step * math.log(2) * (8 - blocks))[None, :, None].bfloat16()
    oracle.check_call(q, k, v, softmax_scale=1.0)
    oracle.check_call(q, k.flip(1), v, softmax_scale=1.0, mask="causal_bottom_right")


@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [9, 13, 15, 17, 120, 130, 1000])
def test_values_scores_far_beyond_a_rows_first_maximum_are_right(dtype, mask, power):
    """By powers of two about what weights may become where maxima are not looked for, and about
    the largest float; neighbouring rows see a quarter of it, and half a tile none."""
    q, k, v = oracle.operands(1, 2, 1, 300, 700, 64, dtype=DTYPES[dtype])
    q, k = torch.zeros_like(q), k * 0.125
    q[:, :140, :, 0] = 1.0
    q[:, 1:140:2, :, 0] = 0.25
    k[:, 200:260, :, 0] += 0.5 * power * math.log(2)
    k[:, 40:100, :, 0] += power * math.log(2)
    oracle.check_call(q, k, v, softmax_scale=1.0, mask=mask)
    oracle.check_call(q, -k, v, softmax_scale=1.0, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 0.1])
def test_values_constant_inputs_return_the_constant(dtype, value):
    x = torch.full((2, 150, 2, 64), value, dtype=DTYPES[dtype], device=oracle.DEVICE)
    out, aux = attngen.attention(x, x, x, mask="causal", backend="cuda", return_lse=True)
    spacing = torch.finfo(x.dtype).eps * abs(x.flatten()[0].item())
    assert (out.float() - x.float()).abs().max() <= spacing
    count = torch.arange(1, 151, device=x.device).double()
    score = x.flatten()[0].double() ** 2 * 64 * 0.125
    assert ((aux.lse.double() - (score + count.log())).abs() <= 1e-4).all()


@pytest.mark.parametrize("d", DIMS)
def test_values_fp16_values_near_the_maximum_stay_finite(d):
    largest = torch.finfo(torch.float16).max
    q, k, v = oracle.operands(1, 2, 2, 130, 300, d, dtype=torch.float16)
    v = torch.full_like(v, largest)
    v[..., ::2] = -largest
    oracle.check_call(q, k, v)
    oracle.check_call(q, k, v, mask="causal")
    assert attngen.attention(q, k, v, backend="cuda").isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("magnitude", [2.0**7, 2.0**9, 2.0**10])
def test_values_scores_to_ten_million_pick_the_largest_key(dtype, mask, magnitude):
    """Scores to 8e6, half the documented limit of 2^24: the largest key wins.

    Powers of two keep the scores exact, so that keys that tie do so in every precision.
    """
    q, k, v = oracle.operands(1, 1, 1, 130, 300, 64, dtype=DTYPES[dtype])
    q, k = (torch.where(x > 0, magnitude, -magnitude).to(x.dtype) for x in (q, k))
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, mask=mask, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, oracle.truth(q, k, v, mask=mask))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.5, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
def test_values_any_softmax_scale_is_right(scale, mask):
    q, k, v = oracle.operands(2, 4, 2, 130, 200, 128)
    oracle.check_call(q, k, v, mask=mask, softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e-30, 1e-37, 1e-39, 1e-45])
def test_values_vanishing_softmax_scale_is_right_or_refused(scale):
    """Scaled to nothing, every visible key counts the same; those that are masked never do."""
    q, k, v = oracle.operands(1, 2, 2, 130, 130, 64)
    try:
        with oracle.nan_filled_allocations():
            out = attngen.attention(q, k, v, mask="causal", softmax_scale=scale, backend="cuda")
    except attngen.AttngenError as error:
        assert "scale" in str(error)
        return
    oracle.check(out, None, oracle.truth(q, k, v, mask="causal", softmax_scale=scale))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_values_nan_and_infinity_stay_in_the_head_that_holds_them(mask):
    q, k, v = oracle.operands(2, 4, 2, 150, 150, 64)
    clean = attngen.attention(q, k, v, mask=mask, backend="cuda")
    k[0, 5, 0, 3] = float("nan")
    v[0, 100, 1, 7] = float("inf")
    spoilt = attngen.attention(q, k, v, mask=mask, backend="cuda")
    assert torch.equal(clean[1], spoilt[1])
    assert spoilt[0, 149, :2].isnan().all() and not spoilt[0, 149, 2:, 7].isfinite().any()
    assert torch.equal(clean[0, :, 2:, :7], spoilt[0, :, 2:, :7])


@pytest.mark.device
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_values_two_hundred_runs_give_the_same_bits(d, mask):
    """Many tiles for each multiprocessor, so that a race that is lost rarely shows up here."""
    q, k, v = oracle.operands(12, 16, 4, 1100, 1100, d)
    first, first_lse = oracle.run((q, k, v), mask)
    oracle.check(first, first_lse, oracle.truth(q, k, v, mask=mask))
    differ = torch.zeros(200, dtype=torch.bool, device=q.device)
    for number in range(200):
        out, lse = oracle.run((q, k, v), mask)
        differ[number] = (out != first).any() | (lse != first_lse).any()
    assert not differ.any(), f"runs {differ.nonzero().flatten().tolist()} differ from the first"


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_values_a_head_is_computed_alike_whatever_stands_beside_it(mask):
    """Order of tiles, head groups and batch must not reach the bits of a row, where all calls have
    tiles of one size."""
    q, k, v = oracle.operands(4, 8, 8, 1032, 1032, 128)
    whole = attngen.attention(q, k, v, mask=mask, backend="cuda")
    alone = attngen.attention(*(x[2:3, :, 5:6] for x in (q, k, v)), mask=mask, backend="cuda")
    assert torch.equal(whole[2:3, :, 5:6], alone)
