"""Rounds of a ring's forward, against a mask of all pairs: each visible one in one part, once."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from attngen.call.context_order import Order
from attngen.call.context_rounds import HELD, Rounds, backward_rounds_of, rounds_of
from attngen.call.context_steps import Length, Span, Step, steps_of
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


def check(order: Order, length: Length, splits: bool, make=rounds_of, **given) -> list[Rounds]:
    """The rounds of all ranks, held to the mask."""
    plans, made = plans_of(order, [length], **given), []
    shown = torch.zeros(length.room_q, length.room_kv, dtype=torch.int)
    for rank, plan in enumerate(plans):
        found = make(plans, rank, splits=splits)
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


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_visible_pair_is_in_one_part(ranks: int, name, splits: bool) -> None:
    order = Order(name, ranks)
    n = order.multiple
    for length in (Length.of(3 * n), Length(6 * n, 6 * n, 6 * n - 1, 6 * n - 1)):
        directions = product(("causal", "none"), (rounds_of, backward_rounds_of))
        made = [check(order, length, splits, make, mask=mask) for mask, make in directions]
        for ranks_of_mask in made:  # messages are sent and received together
            assert len({tuple(x.steps for x in each.rounds) for each in ranks_of_mask}) == 1


def test_most_outputs_are_joined_in_few_parts() -> None:
    """Eight ranks of two chunks each join an output of a half four times, where a part a step
    joined seven, the last rank all of it."""
    order, length = Order("dual_chunk", 8), Length.of(64)
    half, rest = Span(0, 4), Span(4, 8)
    for rank, found in enumerate(check(order, length, True, mask="causal")):
        first, *others = [x.queries for x in found.parts]
        assert first == (rest if rank else Span(0, 8))
        assert others.count(rest) == 4 and others.count(half) == (rank > 0)
        if rank:
            (waited,) = [x for x in found.parts if x.queries == half]
            assert len(waited.keys) == 4 * rank + 4 and waited.window == (-1, 4 * rank)


def test_queries_wait_for_no_more_keys_than_are_named() -> None:
    order = Order("contiguous", 11)
    for rank, found in enumerate(check(order, Length.of(22), True, mask="causal")):
        waiting = [x for x in found.parts if x.queries == Span(0, 1)]
        assert all(len(x.keys) <= (HELD + 1) * 2 for x in waiting)
        assert len(waiting) == [0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3][rank]


def test_the_last_keys_are_the_ranks_own_in_a_backward() -> None:
    order, length = Order("dual_chunk", 4), Length.of(32)
    for found in check(order, length, True, backward_rounds_of, mask="causal"):
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
    assert rounds_of(plans, 0, splits=True) is None is backward_rounds_of(plans, 0, splits=True)
