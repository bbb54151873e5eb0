"""Masks counted exactly: with equal scores O and LSE tell which keys a row has seen, and how many.

The float64 rule cannot notice one key too many among a thousand; these tests do.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attngen
from attngen import reference

from . import cases, oracle

pytestmark = pytest.mark.gpu
WINDOW_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (104, 56), (128, 8), (64, 120))
KERNELS = [
    *cases.core_specs(64, 128, 256),
    *(cases.spec(*dims, window=(1, 1)) for dims in WINDOW_DIMS[3:]),
]

INF = float("-inf")
LSE_ERROR = 1e-5  # of log(count): keys within 2^16 differ by more


def key_codes(s_kv: int, d_v: int) -> torch.Tensor:
    """V whose row j marks two digits of j in base d_v / 2; [1, s_kv, 1, d_v]."""
    base = d_v // 2
    assert s_kv <= base * base
    j = torch.arange(s_kv, device=oracle.DEVICE)
    codes = torch.zeros(s_kv, d_v, device=oracle.DEVICE)
    codes[j, j % base] = 1
    codes[j, base + j // base] = 1
    return codes[None, :, None].bfloat16()


def check_seen(s_q: int, s_kv: int, d: int, **arguments) -> None:
    """Asserts that each row's keys are those of the definition, in number and digit by digit."""
    q = torch.zeros(1, s_q, 2, d, device=oracle.DEVICE, dtype=torch.bfloat16)
    k = oracle.randn(1, s_kv, 1, d)
    v = key_codes(s_kv, d)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    seen = reference.visible(s_q, s_kv, **arguments, device=oracle.DEVICE).double()
    count = seen.sum(1)
    got_count = aux.lse[0].double().exp()
    assert (got_count.round() == count).all(), wrong(got_count.round() != count)
    # Below -inf there is no number to subtract; the counts have already shown those rows equal.
    error = torch.where(count > 0, aux.lse[0].double() - count.log(), 0).abs()
    assert (error <= LSE_ERROR).all()
    assert (aux.lse[0][:, count == 0] == INF).all()
    digits = seen @ v[0, :, 0].double()
    got = (out[0].double() * count[:, None, None]).round()
    assert (got == digits[:, None]).all(), wrong((got != digits[:, None]).any(-1).T)


def wrong(at: torch.Tensor) -> str:
    """Names some of the (head, row) at which a boolean [heads, rows] is true."""
    return f"wrong at (head, row) {at.nonzero()[:8].tolist()}"


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(400, 400), (193, 700), (700, 193), (1, 257), (129, 128)])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_masks_every_window_sees_exactly_its_keys(d, lengths, kind):
    for mask, window, bottom_right in cases.MASKS[kind]:
        check_seen(*lengths, d, mask=mask, window=window, bottom_right=bottom_right)


SIDES = [0, 1, 62, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1 << 20]


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("side", SIDES)
def test_masks_window_at_a_warpgroups_edge_sees_exactly_its_keys(side, d):
    """Each warpgroup visits its own of a tile's blocks, and passes over the others."""
    with oracle.small_tiles(False):
        for lengths in ((450, 450), (65, 700), (700, 193), (1, 130)):
            for low in (False, True):
                check_seen(*lengths, d, window=(side, 0), bottom_right=low)
                check_seen(*lengths, d, window=(side, 70), bottom_right=low)
                check_seen(*lengths, d, window=(-1, side), bottom_right=low)
        check_seen(300, 450, d, mask="causal_bottom_right", window=(side, -1))


@pytest.mark.device
@pytest.mark.parametrize("dims", WINDOW_DIMS, ids=str)
def test_masks_window_of_many_tiles_for_each_cta_is_right(dims):
    """A tile's remains must not reach the next tile, whatever its warpgroups passed over."""
    for s_q, s_kv, window, low in (
        (130, 130, (40, 0), False),
        (193, 700, (300, 0), True),
        (700, 193, (64, 64), False),
        (577, 577, (127, 0), False),
    ):
        q, k, v = oracle.operands(20, 12, 4, s_q, s_kv, *dims)
        oracle.check_call(q, k, v, window=window, bottom_right=low)


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_masks_window_at_a_tile_edge_sees_exactly_its_keys(side):
    for d in (64, 256):
        check_seen(450, 450, d, window=(side, 0))
        check_seen(450, 450, d, window=(0, side))
        check_seen(450, 450, d, window=(side, side))
        check_seen(300, 450, d, mask="causal_bottom_right", window=(side, -1))


@pytest.mark.parametrize("big", [(1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 62)])
def test_masks_enormous_window_side_is_unbounded(big):
    for low in (False, True):
        check_seen(130, 200, 64, window=(big, 3), bottom_right=low)
        check_seen(200, 130, 64, window=(3, big), bottom_right=low)
        check_seen(130, 200, 64, window=(big, big), bottom_right=low)


lengths = st.one_of(
    st.integers(1, 600), st.sampled_from([1, 63, 64, 65, 80, 81, 127, 128, 129, 191, 192, 193])
)
sides = st.one_of(st.just(-1), st.integers(0, 700), st.sampled_from([0, 63, 64, 127, 128, 192]))


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    d=st.sampled_from([64, 128, 256]),
    s_q=lengths,
    s_kv=lengths,
    mask=st.sampled_from(["none", "causal", "causal_bottom_right"]),
    left=sides,
    right=sides,
    low=st.sampled_from([None, True]),
)
def test_masks_any_band_sees_exactly_its_keys(d, s_q, s_kv, mask, left, right, low):
    check_seen(s_q, s_kv, d, mask=mask, window=(left, right), bottom_right=low)


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": "causal_bottom_right"},
        {"window": (10, 5)},
        {"window": (10, 5), "bottom_right": True},
        {"mask": "causal", "window": (3, -1)},
        {"mask": "causal_bottom_right", "window": (0, 0)},
    ],
    ids=str,
)
def test_masks_rows_without_keys_are_zero_with_lse_minus_infinity(d, arguments):
    q, k, v = oracle.operands(2, 4, 2, 700, 150, d)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    given_low = arguments.get("bottom_right")
    seen = reference.visible(
        700, 150, **{**arguments, "bottom_right": given_low}, device=oracle.DEVICE
    ).any(1)
    assert (~seen).sum() > 190, "the case must have a whole tile of empty rows"
    assert not out[:, ~seen].any()
    assert (aux.lse[:, :, ~seen] == INF).all() and aux.lse[:, :, seen].isfinite().all()


def test_masks_no_row_sees_a_key_gives_zeros():
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    far = q[:, :1].expand(1, 300, 2, 64).contiguous()  # query i + 0 - 5 .. i, keys end before
    out, aux = attngen.attention(
        far, k[:, :4], v[:, :4], window=(5, 0), backend="cuda", return_lse=True
    )
    assert not out[:, 9:].any() and (aux.lse[:, :, 9:] == INF).all()
    assert aux.lse[:, :, :9].isfinite().all()
