"""The strategy that `comm="auto"` takes."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.call.context.order import Order
from attngen.errors import SpecError
from attngen.frontends.pytorch.context.calls import asked_of
from attngen.frontends.pytorch.context.choice import LONG, chosen, fastest

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
def test_auto_takes_what_wasfastest(
    length: int, heads: int, heads_kv: int, gradients: bool, order: Order, expected: str
) -> None:
    q, k = (torch.empty(1, length, n, 8, device="meta") for n in (heads, heads_kv))
    asked = SimpleNamespace(q=q, k=k, v=k, given={}, dropout_p=0.0, uniform=True, lengths=(1,))
    q.requires_grad_(gradients)
    assert fastest(asked, order, 2) == expected
    with torch.no_grad():
        assert fastest(asked, order, 2) in ("p2p", "all_gather")


@pytest.mark.parametrize(
    ("heads_kv", "tokens", "order", "expected"),
    [
        (2, 64, DUAL, "a2a"),
        (1, 64, DUAL, "all_gather"),
        (1, 64, STRIPED, "p2p"),
        (1, LONG, DUAL, "p2p"),
    ],
)
def test_sequences_of_lengths_of_their_own_join_few_outputs(
    heads_kv: int, tokens: int, order: Order, expected: str
) -> None:
    q, k = (torch.empty(tokens, n, 8, device="meta") for n in (4, heads_kv))
    ends = torch.tensor([0, 32, 2 * tokens])
    given = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    assert fastest(asked_of(q, k, k, given, 2), order, 2) == expected


@pytest.mark.parametrize(
    ("given", "stripe", "heads_kv", "expected"),
    [
        ({"mask": "causal"}, 1, 2, "p2p"),
        ({"window": (8, 0)}, 1, 2, "a2a"),
        ({"alibi_slopes": True}, 1, 2, "a2a"),
        ({"dropout_p": 0.1}, 1, 2, "a2a"),
        ({"mask": "causal"}, 4, 2, "a2a"),
        ({"mask": "none"}, 4, 2, "p2p"),
    ],
)
def test_auto_takes_what_serves_stripes(
    given: dict[str, Any], stripe: int, heads_kv: int, expected: str
) -> None:
    q, k = (torch.empty(1, 32, n, 8) for n in (4, heads_kv))
    assert chosen(asked_of(q, k, k, given, 2), Order("striped", 2, stripe), 2) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [(DUAL, "takes p2p: the first choice"), (STRIPED, "takes a2a: .*window")],
)
def test_auto_logs_what_it_takes_and_why(order: Order, expected: str, caplog: Any) -> None:
    q, k = (torch.empty(1, 32, n, 8) for n in (4, 2))
    caplog.set_level(logging.INFO, "attngen")
    chosen(asked_of(q, k, k, {"window": (8, 0)}, 2), order, 2)
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.search(expected, said)


def test_auto_says_why_no_strategy_serves() -> None:
    q, k = (torch.empty(1, 32, n, 8) for n in (4, 1))
    asked = asked_of(q, k, k, {"window": (8, 0)}, 2)
    with pytest.raises(SpecError) as found:
        chosen(asked, STRIPED, 2)
    assert len(found.value.reasons) == 3
    assert any("window" in x and "dual_chunk" in x for x in found.value.reasons)
    assert any("do not divide" in x for x in found.value.reasons)
