"""Backwards of more heads or sequences than the axes of a grid have places: their CTAs are all in
the first axis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import attngen

from . import gradients, oracle, varlen
from .varlen import Call

pytestmark = pytest.mark.gpu

MANY = 65_543  # a prime
LENGTHS = (70, 130, 0, 33)
CALLS = [
    Call("bshd", (130, 130, 130), (200, 200, 200), d=64, mask="causal", heads=(4, 2)),
    Call("bshd", (130, 130, 130), (200, 200, 200), d=128, mask="causal", heads=(3, 3)),
    Call("bshd", (500, 500, 500), d=128, window=(40, 0), heads=(6, 3)),  # consumers make D
    Call("bshd", (130, 130, 130), (90, 90, 90), d=256, heads=(3, 1)),
    Call("bshd", (70, 0, 128), (90, 50, 70), room=(128, 100), d=64, heads=(4, 2)),
    Call("thd", LENGTHS, d=128, mask="causal", heads=(4, 2), gaps=True),
]
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))


@pytest.fixture
def few_places() -> Iterator[None]:
    with oracle.folded_grids():
        yield


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_by_a_folded_grid_are_right(call, deterministic, few_places):
    varlen.check(call, deterministic=deterministic)


def test_gradients_of_heads_apart_by_a_folded_grid_are_right(few_places, monkeypatch):
    """Sums of dK and dV are rounded by CTAs of the same grid."""
    monkeypatch.setattr("attngen.kernels.wgmma.backward.cost.is_faster", lambda *_: True)
    for call in CALLS[0], CALLS[5]:
        varlen.check(call)


@pytest.mark.device
@pytest.mark.parametrize(
    ("batch", "heads", "d", "window"),
    [
        (MANY, 2, 64, -1),
        (1, MANY, 64, -1),
        (MANY, 1, 128, 2),
        (1, MANY, 128, 2),
        (2, MANY, 256, -1),
    ],
)
def test_gradients_of_many_heads_and_sequences_are_right(batch, heads, d, window):
    q, k, v = oracle.operands(batch, heads, heads, 4, 4, d)
    given = [x.requires_grad_() for x in (q, k, v)]
    out = attngen.attention(*given, window=(window, 0 if window > 0 else -1), backend="cuda")
    d_o = oracle.randn(*out.shape, seed=5)
    found = torch.autograd.grad(out, given, d_o)
    places = [(0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2), (min(batch - 1, 65536), 0)]
    for b, h in places:
        alone = [x.detach()[b : b + 1, :, h : h + 1] for x in (q, k, v, d_o)]
        arguments = {"window": (window, 0 if window > 0 else -1)}
        gradients.check([x[b : b + 1, :, h : h + 1] for x in found], alone, None, **arguments)
