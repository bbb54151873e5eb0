"""tools/context_parallel.py: its cases are calls that their strategies serve, forward and plan."""

from __future__ import annotations

import pytest
import torch

from attngen.call.context_order import Order
from attngen.frontends.pytorch import context_calls, context_strategies
from tools import context_parallel


@pytest.mark.parametrize("case", [*context_parallel.cases()], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_case_is_served_by_its_strategy(case: context_parallel.Case, ranks: int) -> None:
    heads, heads_kv = context_parallel.HEADS, context_parallel.HEADS_KV
    q, k, v = (torch.zeros(1, case.length // ranks, n, 8) for n in (heads, heads_kv, heads_kv))
    asked = context_calls.asked_of(q, k, v, case.given, ranks)
    if case.comm == "a2a":
        assert not context_strategies._against_heads(asked, ranks)
        return
    place = context_calls.Ranks(None, ranks, ranks - 1)
    features = context_calls.features_of(asked, None, 0, heads)
    gathers, order = case.comm == "all_gather", Order(case.order, ranks)
    call = context_calls.context_call(asked, order, place, gathers, features, torch.float32)
    assert len(call.used) == 1 and call.features.by_position == ("dropout_p" in case.given)
