"""The strategy that `comm="auto"` takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attngen.call.context_order import Order
from attngen.frontends.pytorch.context_calls import asked_of
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
    asked = SimpleNamespace(q=q, k=k, v=k, given={}, dropout_p=0.0, uniform=True, lengths=(1,))
    q.requires_grad_(gradients)
    assert _fastest(asked, order, 2) == expected
    with torch.no_grad():
        assert _fastest(asked, order, 2) in ("p2p", "all_gather")


@pytest.mark.parametrize(("heads_kv", "expected"), [(2, "a2a"), (1, "p2p")])
def test_sequences_of_lengths_of_their_own_are_one_launch(heads_kv: int, expected: str) -> None:
    q, k = (torch.empty(64, n, 8, device="meta") for n in (4, heads_kv))
    ends = torch.tensor([0, 32, 128])
    given = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    assert _fastest(asked_of(q, k, k, given, 2), DUAL, 2) == expected
