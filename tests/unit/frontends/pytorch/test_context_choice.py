"""The strategy that `comm="auto"` takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attngen.call.context_order import Order
from attngen.frontends.pytorch.context_strategies import LONG, _fastest

DUAL, STRIPED = Order("dual_chunk", 2), Order("striped", 2)


@pytest.mark.parametrize(
    "length, heads, heads_kv, gradients, order, expected",
    [
        (LONG - 1, 32, 8, False, DUAL, "p2p"),
        (LONG, 32, 8, False, DUAL, "all_gather"),
        (LONG, 32, 8, False, STRIPED, "p2p"),
        (LONG, 32, 16, False, DUAL, "p2p"),
        (LONG, 32, 8, True, DUAL, "p2p"),
        (LONG, 32, 32, True, DUAL, "a2a"),
        (LONG, 33, 33, True, DUAL, "p2p"),  # heads that two ranks do not divide
    ],
)
def test_auto_takes_what_was_fastest(
    length: int, heads: int, heads_kv: int, gradients: bool, order: Order, expected: str
) -> None:
    q, k = (torch.empty(1, length, n, 8, device="meta") for n in (heads, heads_kv))
    asked = SimpleNamespace(q=q, k=k, v=k, given={}, dropout_p=0.0, uniform=True)
    q.requires_grad_(gradients)
    assert _fastest(asked, order, 2) == expected
    with torch.no_grad():
        assert _fastest(asked, order, 2) in ("p2p", "all_gather")
