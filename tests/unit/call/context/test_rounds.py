"""Rounds of a ring's forward, against a mask of all pairs: each visible one in one part, once."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from attngen.call.context.order import Order
from attngen.call.context.rounds import HELD, Rounds, backward_rounds_of, rounds_of
from attngen.call.context.rows import rows_of
from attngen.call.context.steps import Length, Span, Step, steps_of
from attngen.reference.masks import visible


def plans_of(order: Order, lengths: list[Length], **given) -> list[tuple[Step, ...]]:
    return [steps_of(order, rank, lengths, **given) for rank in range(order.ranks)]


def positions_in(found: Rounds, region: int | None, plan, order: Order, room: int) -> torch.Tensor:
    """The positions of a region's keys, −1 where there are none."""
    if region is None:
        return torch.tensor(order.positions(plan[0].source, [room]))
    at_hand = torch.full((found.regions[region].tokens,), -1)
    for step, place in found.regions[region].places.items():
        (part,) = plan[step].parts
        held = torch.tensor(order.positions(plan[step].source, [room]))
        at_hand[slice(*place)] = held[slice(*part.keys)][: len(place)]
    return at_hand


FORWARD, BACKWARD = partial(rounds_of, going=2), partial(backward_rounds_of, splits=True)


def check(order: Order, length: Length, make=FORWARD, **given) -> list[Rounds]:
    """The rounds of all ranks, held to the mask."""
    plans, made = plans_of(order, [length], **given), []
    shown = torch.zeros(length.room_q, length.room_kv, dtype=torch.int)
    for rank, plan in enumerate(plans):
        found = make(plans, rank)
        assert found is not None
        made.append(found)
        came: set[int] = {0}
        for each in found.rounds:
            came |= {*each.steps}
            keys = positions_in(found, each.region, plan, order, length.room_kv)
            queries = torch.tensor(order.positions(rank, [length.room_q]))
            for part in each.parts:
                seen = visible(len(part.queries), len(part.keys), window=part.window)
                own_q, own_k = queries[slice(*part.queries)], keys[slice(*part.keys)]
                assert (own_k >= 0).all() and seen.any(0).all() and seen.any(1).all()
                if each.region is not None:
                    read = [
                        n
                        for n, x in found.regions[each.region].places.items()
                        if x.begin < part.keys.end and part.keys.begin < x.end
                    ]
                    assert {*read} <= came, "a message that has not come"
                shown[own_q[:, None], own_k] += seen.int()
    wanted = torch.zeros_like(shown)
    wanted[: length.q, : length.kv] = visible(length.q, length.kv, **given).int()
    assert torch.equal(shown, wanted), (order, length, given)
    return made


@pytest.mark.parametrize("name", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_visible_pair_is_in_one_part(ranks: int, name) -> None:
    order = Order(name, ranks)
    n = order.multiple
    for length in (Length.of(3 * n), Length(6 * n, 6 * n, 6 * n - 1, 6 * n - 1)):
        half = length.room_q // ranks // 2
        forwards = [partial(rounds_of, going=going) for going in (0, 1, half)]
        makes = (*forwards, BACKWARD, partial(backward_rounds_of, splits=False))
        calls = product(("causal", "none"), makes)
        made = [check(order, length, make, mask=mask) for mask, make in calls]
        for ranks_of_mask in made:  # messages are sent and received together
            assert len({tuple(x.steps for x in each.rounds) for each in ranks_of_mask}) == 1


def joins_of(found: Rounds) -> int:
    """How many rows join what is there."""
    _, rows = rows_of(found.parts, 8)
    return sum(len(x.queries) * (not y.new) for x, y in zip(found.parts, rows, strict=True))


def test_few_queries_join_outputs() -> None:
    """Two of a rank's 8 queries go on; others have one part. A part a step joined 8 or 4 rows at
    each but the first."""
    for ranks, most in ((2, 2), (4, 4), (8, 6)):
        order = Order("dual_chunk", ranks)
        made = check(order, Length.of(8 * ranks), mask="causal")
        assert max(map(joins_of, made)) == most
        first, *_, last = [[x.queries for x in found.parts] for found in made]
        assert first[0] == last[0] == Span(6, 8) and first[len(first) - 1] == Span(0, 4)
        assert first.count(Span(4, 6)) == 1 and last.count(Span(0, 6)) == 1


def test_queries_wait_for_no_more_keys_than_are_named() -> None:
    order = Order("contiguous", 11)
    for rank, found in enumerate(check(order, Length.of(44), mask="causal")):
        waiting = [x for x in found.parts if x.queries == Span(0, 2)]
        assert all(len(x.keys) <= (HELD + 1) * 4 for x in waiting)
        assert len(waiting) == [0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2][rank]


def held(found: Rounds, ahead: int = 2) -> int:
    """The most keys that regions have room for at a time, with those that are asked for."""
    most = 0
    for now in range(len(found.rounds)):
        used = {x.region: n for n, x in enumerate(found.rounds)}  # for the last time
        asked = {x.region for x in found.rounds[: now + ahead + 1]} - {None}
        alive = [found.regions[n].tokens for n in asked if used[n] >= now]
        most = max(most, sum(alive))
    return most


@pytest.mark.parametrize(
    ("ranks", "forward", "backward"), [(2, 1.75, 1), (4, 3.75, 3), (8, 7.75, 6), (16, 15.75, 6)]
)
def test_keys_of_others_take_what_the_guide_says(ranks: int, forward: float, backward) -> None:
    order, own = Order("dual_chunk", ranks), 64
    plans = plans_of(order, [Length.of(own * ranks)], mask="causal")
    for make, most in ((partial(rounds_of, going=16), forward), (BACKWARD, backward)):
        found = [make(plans, rank) for rank in range(ranks)]
        assert max(held(x) for x in found if x is not None) == most * own


def test_the_last_keys_are_the_ranks_own_in_a_backward() -> None:
    order, length = Order("dual_chunk", 4), Length.of(32)
    for found in check(order, length, BACKWARD, mask="causal"):
        first, *_, last = found.rounds
        assert (first.region, last.region) == (None, None)
        assert [x.keys for x in (*first.parts, *last.parts)] == [Span(0, 4), Span(4, 8)]


@pytest.mark.parametrize(
    ("order", "lengths", "given"),
    [
        (Order("dual_chunk", 4), [Length.of(32)], {"mask": "causal", "window": (9, 0)}),
        (Order("dual_chunk", 4), [Length.of(32)], {"mask": "causal", "by_position": True}),
        (Order("dual_chunk", 2), [Length.of(8)] * 2, {"mask": "causal"}),
        (Order("dual_chunk", 2), [Length(8, 16, 8, 16)], {"mask": "causal"}),
        (Order("striped", 2), [Length.of(8)], {"mask": "causal"}),
        (Order("dual_chunk", 1), [Length.of(8)], {}),
    ],
    ids=["window", "positions", "sequences", "cross", "stripes", "alone"],
)
def test_other_plans_have_no_rounds(order: Order, lengths: list[Length], given) -> None:
    plans = plans_of(order, lengths, **given)
    assert FORWARD(plans, 0) is None is BACKWARD(plans, 0)
