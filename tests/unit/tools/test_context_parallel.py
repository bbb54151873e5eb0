"""tools/context_parallel.py: its cases are calls that their strategies serve, forward and plan."""

from __future__ import annotations

import pytest
import torch

from attngen.call.context.order import Order
from attngen.frontends.pytorch.context import calls as context_calls
from attngen.frontends.pytorch.context import choice as context_choice
from tools import context_parallel

RANKS = (2, 4)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, case) for ranks in RANKS for case in context_parallel.cases(ranks)],
    ids=str,
)
def test_case_is_served_by_its_strategy(ranks: int, case: context_parallel.Case) -> None:
    heads, heads_kv = context_parallel.HEADS, context_parallel.HEADS_KV
    given = {**case.given, **case.sequences}
    count, length = case.batch
    if "bias" in given:
        given["bias"] = torch.empty(1, 1, length // ranks, length, dtype=case.dtype)
    outer, tokens = () if "layout" in given else (count,), length // ranks
    q, k, v = (
        torch.empty(*outer, tokens, n, 8, dtype=case.dtype) for n in (heads, heads_kv, heads_kv)
    )
    asked = context_calls.asked_of(q, k, v, given, ranks)
    if case.comm.startswith("a2a"):
        inner = context_parallel.INNER if case.comm == "a2a+p2p" else ranks
        assert not context_choice.against_heads(asked, inner)
        return
    place = context_calls.Ranks(None, ranks, ranks - 1)
    features = context_calls.features_of(asked, None, 0, heads)
    gathers, order = case.comm == "all_gather", Order(case.order, ranks)
    call = context_calls.context_call(asked, order, place, gathers, features, torch.float32)
    assert len(call.used) == len(case.lengths)
    assert call.features.by_position == bool({"dropout_p", "bias"} & {*case.given})


@pytest.mark.parametrize("ranks", RANKS)
def test_lengths_of_packed_calls_are_all_tokens_and_can_be_cut(ranks: int) -> None:
    lengths = context_parallel.lengths_of(8192 * ranks, ranks, 16)
    Order("dual_chunk", ranks).check(lengths)
    assert len(lengths) == 16 and sum(lengths) == 8192 * ranks and min(lengths) > 0
