"""tools/context_parallel.py: its cases are calls that their strategies serve, forward and plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from attngen import parallel
from attngen.call.context.order import Order
from attngen.frontends.pytorch.context import calls as context_calls
from attngen.frontends.pytorch.context import choice as context_choice
from tools import context_check, context_parallel
from tools.context_bench import Shape
from tools.context_check import Case
from tools.context_pool import Pool

RANKS = (2, 4)
SHORT = {"lengths": (96,), "shape": Shape(4, 2, 32, 16)}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, case) for ranks in RANKS for case in context_check.cases(ranks)],
    ids=str,
)
def test_case_is_served_by_its_strategy(ranks: int, case: Case) -> None:
    heads, heads_kv, dim, dim_v = case.shape
    given = {**case.given, **case.sequences}
    count, length = case.batch
    if "bias" in given:
        given["bias"] = torch.empty(1, 1, length // ranks, length, dtype=case.dtype)
    outer, tokens = () if "layout" in given else (count,), length // ranks
    sizes = (heads, dim), (heads_kv, dim), (heads_kv, dim_v)
    q, k, v = (torch.empty(*outer, tokens, *size, dtype=case.dtype) for size in sizes)
    asked = context_calls.asked_of(q, k, v, given, ranks)
    if case.comm.startswith("a2a"):
        inner = context_check.INNER if case.comm == "a2a+p2p" else ranks
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


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two processes that check cases on the reference."""
    pool = Pool(2, "gloo", context_check.check, 120.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "case",
    [
        Case("p2p", given={"mask": "causal", "deterministic": True}, **SHORT),
        Case("all_gather", given={"window": (30, 4)}, dtype=torch.float16, **SHORT),
        Case("a2a", given={"mask": "causal", "dropout_p": 0.1}, **SHORT),
        Case("p2p", lengths=(32, 64), given={"mask": "causal"}, shape=Shape(4, 1, 16, 16)),
        Case("all_gather", lengths=(50, 64), given={"bias": True}, padded=True),
    ],
    ids=str,
)
def test_cases_are_right_on_the_reference(pair: Pool, case: Case) -> None:
    found = pair.run(case)
    assert not found.fault
    assert all(line["right"] and line["same"] for line in found.results)
    assert set(found.results[0]["errors"]) == {"out", "dq", "dk", "dv"}


def doubled(case: Case) -> dict[str, Any]:
    """A check whose values are doubled over a group, and in no single call."""
    gathered = parallel.attention
    with patch.object(context_check.parallel, "attention") as found:
        found.side_effect = lambda q, k, v, **given: gathered(q, k, 2 * v, **given)
        return context_check.check(case)


def test_a_wrong_result_is_found() -> None:
    pool = Pool(2, "gloo", doubled, 120.0)
    found = pool.run(Case("all_gather", given={"mask": "causal"}, **SHORT))
    pool.close()
    assert not found.fault and not any(line["right"] for line in found.results)
