"""Binding and finding calls, of a library that has tensors and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from attngen.call.bind import binder, homes_of
from attngen.call.cache import FORMATS, KEYS, RECENT, CallCache


@dataclass(eq=False)
class Array:
    """A tensor of a library of its own."""

    size: int = 1

    def numel(self) -> int:
        return self.size


Q, K, V, SINK, TABLE = (Array(4) for _ in range(5))
STATE = (True,)
bind = binder(Array)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"mask": "causal"}),
        ({"mask": "causal"}, {"softmax": "causal"}),
        ({"sink": SINK}, {"bias": SINK}),
        ({"alibi_slopes": True}, {"alibi_slopes": 1}),
        ({"num_splits": 1}, {"num_splits": True}),
        ({"num_splits": 1}, {"num_splits": 1.0}),
        ({"page_table": TABLE}, {"page_table": (TABLE,)}),
        ({"page_table": (TABLE, TABLE)}, {"page_table": [TABLE, TABLE]}),
        ({"schedule": object()}, {}),
        ({"max_seqlen_q": 3}, {"max_seqlen_q": 4}),
        ({"window": (1, 0)}, {"window": (2, 0)}),
        ({"alibi_slopes": SINK}, {"alibi_slopes": True}),
    ],
    ids=lambda given: "+".join(given) or "nothing",
)
def test_key_tells_calls_apart(one, other) -> None:
    (first, _), (second, _) = (bind(STATE, Q, K, V, given) for given in (one, other))
    assert first is not None and first != second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sink": SINK}, {"sink": Array()}),
        ({"mask": None, "sink": None}, {}),
        ({"max_seqlen_q": Array()}, {"max_seqlen_q": None}),
        ({"max_seqlen_q": Array()}, {"max_seqlen_q": Array()}),
        ({"schedule": object()}, {"schedule": object()}),
    ],
    ids=lambda given: "+".join(given) or "nothing",
)
def test_key_is_the_same_of_calls_that_differ_in_what_it_need_not_say(one, other) -> None:
    (first, _), (second, _) = (bind(STATE, Q, K, V, given) for given in (one, other))
    assert first is not None and first == second


@pytest.mark.parametrize(
    "given",
    [
        {"softmax_scale": Array()},
        {"max_seqlen_q": Array(2)},
        {"score_mod": lambda *_: 0},
        {"page_table": (TABLE, 3)},
    ],
    ids=lambda given: "+".join(given) or "nothing",
)
def test_call_whose_key_would_not_say_all_has_none(given) -> None:
    assert bind(STATE, Q, K, V, given)[0] is None


def test_state_and_carriers_are_in_the_key() -> None:
    keys = {
        bind(state, Q, *others, {})[0]
        for state in ((True,), (False,))
        for others in ((K, V), (K, None), (None, None))
    }
    assert len(keys) == 6


def test_tensors_are_bound_in_the_order_in_which_they_are_given() -> None:
    given = {"sink": SINK, "mask": "causal", "page_table": (K, V), "max_seqlen_q": Array()}
    _, tensors = bind(STATE, Q, K, None, given)
    assert [id(x) for x in tensors] == [id(x) for x in (Q, K, SINK, K, V)]
    homes = homes_of(Q, K, None, given, {}, Array)
    assert homes == {"q": 0, "k": 1, "sink": 2, "page_table_k": 3, "page_table_v": 4}
    one = homes_of(Q, K, V, {"page_table": TABLE}, {}, Array)
    assert one == {"q": 0, "k": 1, "v": 2, "page_table_k": 3, "page_table_v": 3}
    of_fragment = homes_of(Q, K, V, {"prefix": SINK}, {"prefix": "operand_0"}, Array)
    assert of_fragment == {"q": 0, "k": 1, "v": 2, "operand_0": 3}


class Guards:
    """Guards that tell tensors apart by their sizes, and take each once."""

    def __init__(self, tensors) -> None:
        self.sizes = [x.size for x in tensors]

    def check(self, *tensors) -> bool:
        assert len({id(x) for x in tensors}) == len(tensors)
        return [x.size for x in tensors] == self.sizes


def test_cache_finds_calls_of_the_same_formats() -> None:
    cache: CallCache[str] = CallCache(Guards)
    cache.note("key", [Array(1), Array(2)], "one")
    cache.note("key", [Array(3), Array(2)], "other")
    assert cache.find("key", [Array(1), Array(2)]) == "one"
    assert cache.find("key", [Array(3), Array(2)]) == "other"
    assert cache.find("key", [Array(2), Array(2)]) is None
    assert cache.find("another", [Array(1), Array(2)]) is None
    assert cache.find(["no hash"], []) is None and cache.find(None, []) is None


def test_cache_tells_a_tensor_given_twice_from_two() -> None:
    cache: CallCache[str] = CallCache(Guards)
    twice = Array(5)
    cache.note("key", [twice, Array(1), twice], "same")
    cache.note("all", [twice, twice], "all")
    other = Array(5)
    assert cache.find("key", [other, Array(1), other]) == "same"
    assert cache.find("key", [Array(5), Array(1), other]) is None
    assert cache.find("all", [other, other]) == "all"


def test_cache_forgets_what_is_too_much() -> None:
    cache: CallCache[int] = CallCache(Guards)
    for size in range(RECENT + 1):
        cache.note("key", [Array(size)], size)
    assert cache.find("key", [Array(0)]) is None and cache.find("key", [Array(RECENT)]) == RECENT
    for number in range(KEYS + 1):
        cache.note(number, [Array()], number)
    assert len(cache.recent) <= KEYS
    made = [cache.remember(number, lambda number=number: number + 1) for number in range(3)]
    assert made == [1, 2, 3] and cache.remember(1, lambda: pytest.fail("made twice")) == 2
    for number in range(FORMATS + 1):
        cache.keep(number, number)
    assert len(cache.by_format) <= FORMATS
