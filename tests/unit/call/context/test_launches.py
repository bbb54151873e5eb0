"""Launches of parts of many sequences, against a mask of all pairs: each visible one once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attngen.call.context.launches import KEEPS, ROUNDS, Form, Launch
from attngen.call.context.order import Order
from attngen.call.context.packed import Together, around, over_all, sent_of
from attngen.call.context.steps import Band, Length, parts_over_all, steps_of
from attngen.reference.masks import visible
from attngen.spec.masks import band_of

ORDERS = [
    *(Order("dual_chunk", ranks) for ranks in (1, 2, 3, 4)),
    Order("contiguous", 3),
    Order("striped", 4),
]
BANDS: list[dict[str, Any]] = [
    {"mask": "causal"},
    {"mask": "none"},
    {"window": (5, 2)},
    {"window": (3, -1)},
    {"mask": "padding_causal_bottom_right", "window": (11, -1)},
]
FORMS: list[dict[str, Any]] = [
    {},
    {"apart": True},
    {"placed": False},
    {"by_position": True},
    {"by_position": True, "apart": True},
]


def lengths_of(order: Order) -> list[Length]:
    n = order.multiple
    return [Length.of(3 * n), Length(2 * n, 4 * n, 2 * n - 1, 3 * n + 1), Length(n, n, n, n)]


def wanted_of(lengths: Sequence[Length], given: dict[str, Any]) -> torch.Tensor:
    """All pairs of tokens that a call shows."""
    blocks = []
    for x in lengths:
        seen = torch.zeros(x.room_q, x.room_kv, dtype=torch.int)
        seen[: x.q, : x.kv] = visible(x.q, x.kv, **given).int()
        blocks.append(seen)
    return torch.block_diag(*blocks)


def show(launch: Launch, shown: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Count the pairs of a launch. queries, keys: tokens of the whole, of the rank's and of those
    at hand."""
    left, right = launch.window
    places = launch.places or [(0, 0, 0, 0)] * len(launch.parts)
    assert len(launch.queries) == len(launch.keys) == len(places) == len(launch.parts)
    for rows, columns, (*_, delta, _) in zip(launch.queries, launch.keys, places, strict=True):
        distance = torch.arange(len(columns)) - torch.arange(len(rows))[:, None] - delta
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance >= -left) | torch.tensor(left < 0)
        seen &= (distance <= right) | torch.tensor(right < 0)
        shown[queries[slice(*rows)][:, None], keys[slice(*columns)]] += seen.int()


def check_launch(launch: Launch, apart: bool) -> None:
    """Queries follow each other, and keys where nobody may share them."""
    for spans in (launch.queries, *([launch.keys] if apart else [])):
        ends = [0, *(span.end for span in spans)]
        assert all(end <= span.begin for end, span in zip(ends, spans, strict=False))


def check_marks(together: Together, tokens: int) -> None:
    """Whoever goes on finds sums, and the last to have a row rounds it."""
    sums, rounded = [True] * tokens, [False] * tokens
    for launch in (each for step in together.forward for each in step):
        for rows, mark in zip(launch.queries, launch.marks, strict=True):
            for row in range(*rows):
                assert sums[row]
                sums[row], rounded[row] = bool(mark & KEEPS), bool(mark & ROUNDS)
    met = {row for step in together.forward for x in step for y in x.queries for row in range(*y)}
    assert all(rounded[row] for row in met)
    assert together.covered == (len(met) == tokens)


def form_of(given: dict[str, Any], form: dict[str, Any]) -> Form:
    band = Band(*band_of(given.get("mask", "none"), given.get("window", (-1, -1))))
    return Form(band, **form)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("given", BANDS, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_visible_pair_is_in_one_launch(order, given, form) -> None:
    by_position = form.get("by_position", False)
    if order.name == "striped" and (by_position or given not in BANDS[:2]):
        pytest.skip("stripes have no steps for it")
    lengths, kind = lengths_of(order), form_of(given, form)
    rooms = [x.room_q for x in lengths], [x.room_kv for x in lengths]
    ranks = range(order.ranks)
    plans = [steps_of(order, r, lengths, by_position=by_position, **given) for r in ranks]
    held = [torch.tensor(order.shard(rank, rooms[1])) for rank in ranks]
    forward, backward = (torch.zeros(sum(rooms[0]), sum(rooms[1])).int() for _ in range(2))
    for rank in ranks:
        queries = torch.tensor(order.shard(rank, rooms[0]))
        together = around(order, rank, plans, tuple(lengths), kind)
        check_marks(together, len(queries))
        for number, step in enumerate(plans[rank]):
            keys = held[step.source]
            if number:
                sent = sent_of(step.parts, lengths, order.ranks)
                assert sent.whole == (sent.tokens == len(keys))
                keys = torch.cat([keys[:0], *(keys[slice(*run)] for run in sent.runs)])
                assert len(keys) == sent.tokens
            for launch in together.forward[number]:
                check_launch(launch, kind.apart)
                show(launch, forward, queries, keys)
            for launch in together.backward[number]:
                check_launch(launch, True)
                show(launch, backward, queries, keys)
    wanted = wanted_of(lengths, given)
    assert torch.equal(forward, wanted) and torch.equal(backward, wanted)


@pytest.mark.parametrize("given", BANDS, ids=str)
@pytest.mark.parametrize("order", ORDERS[:5], ids=str)
def test_every_visible_pair_of_gathered_keys_is_in_one_launch(order, given) -> None:
    lengths, kind = lengths_of(order), form_of(given, {})
    rooms = [x.room_q for x in lengths]
    keys = torch.arange(sum(x.room_kv for x in lengths))
    shown = torch.zeros(sum(rooms), len(keys)).int()
    for rank in range(order.ranks):
        parts = parts_over_all(order, rank, lengths, **given)
        together = over_all(order, rank, parts, tuple(lengths), kind)
        queries = torch.tensor(order.shard(rank, rooms))
        check_marks(together, len(queries))
        ((launch, *others),) = together.forward
        assert not others or given.get("window", (-1, -1))[0] >= 0
        for each in (launch, *others):
            show(each, shown, queries, keys)
    assert torch.equal(shown, wanted_of(lengths, given))


def test_a_step_of_many_causal_sequences_is_one_launch_without_places() -> None:
    order = Order("dual_chunk", 4)
    lengths = tuple(Length.of(16 * n) for n in (3, 1, 7, 4))
    plans = [steps_of(order, rank, lengths, mask="causal") for rank in range(4)]
    together = around(order, 1, plans, lengths, Form(Band(None, 0)))
    assert [len(step) for step in together.forward] == [1] * 4
    own, *others = (launch for step in together.forward for launch in step)
    assert own.window == (-1, 0) and {x.window for x in others} == {(-1, -1)}
    assert all(x.places is None for x in (own, *others))
