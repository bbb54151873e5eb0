"""Steps of context parallelism, against a mask of all pairs: each visible one in one part, once."""

from __future__ import annotations

import itertools

import pytest
import torch

from attngen.call.context.order import ORDERS, Order
from attngen.call.context.steps import Length, Part, Span, steps_of
from attngen.errors import SpecError
from attngen.reference.masks import visible

WINDOWS = [(-1, -1), (0, 0), (3, 0), (None, 2), (5, 7), (40, -1)]
MASKS = ("none", "causal", "causal_bottom_right", "padding_causal")


def seen_of(part: Part) -> torch.Tensor:
    """Pairs of queries and keys that a part shows, by its own words."""
    i, j = torch.arange(len(part.queries))[:, None], torch.arange(len(part.keys))[None, :]
    seen = torch.ones(len(part.queries), len(part.keys), dtype=torch.bool)
    if part.left is not None:
        seen &= j >= i + part.delta - part.left
    if part.right is not None:
        seen &= j // part.stripe <= (i + part.delta + part.right) // part.stripe
    return seen


def check(order: Order, lengths: list[Length], by_position: bool = False, **arguments) -> None:
    """The plans of all ranks, held to the mask."""
    shown = [torch.zeros(x.room_q, x.room_kv, dtype=torch.int) for x in lengths]
    for rank in range(order.ranks):
        steps = steps_of(order, rank, lengths, by_position=by_position, **arguments)
        assert [x.source for x in steps] == [(rank - n) % order.ranks for n in range(order.ranks)]
        for source, part in ((step.source, part) for step in steps for part in step.parts):
            length, seen = lengths[part.sequence], seen_of(part)
            assert seen.any(0).all() and seen.any(1).all(), "each query and key is in a pair"
            assert (part.left is None and part.right is None) == bool(seen.all())
            held = [
                torch.tensor(order.positions(x, [room]))[slice(*span)]
                for x, room, span in (
                    (rank, length.room_q, part.queries),
                    (source, length.room_kv, part.keys),
                )
            ]
            if by_position:
                assert part.origin == (held[0][0], held[1][0])
                assert all((x.diff() == 1).all() for x in held), "positions follow each other"
            if part.stripe == 1:
                sides = visible(*seen.shape, window=part.window)
                assert torch.equal(seen, sides) and min(part.window) >= -1
            shown[part.sequence][held[0][:, None], held[1][None, :]] += seen.int()
        for step in steps:
            assert step.message == (step.source != rank and bool(step.parts))
    for length, found in zip(lengths, shown, strict=True):
        wanted = torch.zeros_like(found)
        wanted[: length.q, : length.kv] = visible(length.q, length.kv, **arguments).int()
        assert torch.equal(found, wanted), (order, length, arguments)


def lengths_of(n: int) -> list[Length]:
    """Sequences of multiples of n, whole and partly in use, with as many keys as queries or not."""
    return [Length.of(3 * n), Length(n, 4 * n, n - 1, 4 * n - 2), Length(2 * n, n, n - 1, n)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("name", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_visible_pair_is_in_one_part(ranks: int, name, by_position: bool) -> None:
    order = Order(name, ranks)
    calls = [*itertools.product(MASKS, WINDOWS)]
    for mask, window in calls[ranks % 4 :: 4]:  # all of them meet two counts of ranks
        check(order, lengths_of(order.multiple), by_position, mask=mask, window=window)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("stripe", [1, 2, 5])
def test_every_visible_pair_of_stripes_is_in_one_part(stripe: int, mask: str) -> None:
    for ranks in range(1, 9):
        order = Order("striped", ranks, stripe)
        check(order, lengths_of(order.multiple), mask=mask)


def test_spans_are_made_of_their_ends() -> None:
    """By what copies named tuples, too, which counts fields by len."""
    assert Span._make((3, 9)) == Span(3, 9) == Span(0, 9)._replace(begin=3) and len(Span(9, 3)) == 0


def test_a_side_of_the_call_decides_the_alignment() -> None:
    lengths = [Length(8, 16, 7, 14)]
    for mask, aligned in (("causal", True), ("causal_bottom_right", False)):
        check(Order("dual_chunk", 2), lengths, mask=mask, bottom_right=aligned)


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_a_causal_ring_of_two_chunks_has_a_part_a_step(ranks: int) -> None:
    """Own chunks under one diagonal; of ranks before, all queries and the first chunk of keys; of
    those behind, the second chunk of queries and all keys."""
    order, size = Order("dual_chunk", ranks), 6
    for rank in range(ranks):
        own, *others = steps_of(order, rank, [Length.of(size * 2 * ranks)], mask="causal")
        last = rank == ranks - 1  # whose chunks follow each other
        whole, first, second = Span(0, 2 * size), Span(0, size), Span(size, 2 * size)
        (part,) = own.parts
        assert (part.queries, part.keys, part.window) == (whole, whole, (-1, 0))
        assert (part.origin is not None) == last
        for step in others:
            (part,) = step.parts
            before = step.source < rank
            assert (part.queries, part.keys) == ((whole, first) if before else (second, whole))
            assert part.window == (-1, -1)


def test_a_full_mask_needs_a_part_a_step_of_any_order() -> None:
    for name in ORDERS:
        lengths = [Length.of(24), Length(24, 48, 20, 48)]
        for rank in range(3):
            steps = steps_of(Order(name, 3), rank, lengths)
            assert [[x.sequence for x in step.parts] for step in steps] == [[0, 1]] * 3


def test_far_ranks_of_a_window_send_nothing() -> None:
    """A window of 12 positions reaches, of chunks of 8, those of two ranks before."""
    order, lengths = Order("contiguous", 8), [Length.of(64)]
    plans = [steps_of(order, rank, lengths, window=(12, 0)) for rank in range(8)]
    for rank, steps in enumerate(plans):
        sent = [step.source for step in steps if step.message]
        assert sent == [each for each in (rank - 1, rank - 2) if each >= 0]
    keys = [part.keys for part in plans[5][2].parts]
    assert keys == [Span(4, 8)], "a halo, and not the whole chunk"


@pytest.mark.parametrize("name", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("window", [(-1, -1), (9, 0), (0, 20)])
def test_keys_travel_as_far_as_somebody_needs_them(name, window) -> None:
    ranks = 5
    plans = [steps_of(Order(name, ranks), x, [Length.of(40)], window=window) for x in range(ranks)]
    for source in range(ranks):
        needed = [plans[(source + n) % ranks][n].message for n in range(ranks)]
        travels = [plans[(source + n) % ranks][n].travels for n in range(ranks)]
        assert travels == [n > 0 and any(needed[n:]) for n in range(ranks)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"window": (3, 0)}, "no steps for window="),
        ({"mask": "causal_bottom_right"}, "an alignment to the bottom right"),
        ({"mask": "chunked"}, "no steps for mask='chunked'"),
        ({"mask": "arbitrary"}, "no steps for mask='arbitrary'"),
        ({"by_position": True}, "ALiBi"),
    ],
)
def test_stripes_refuse_by_name_what_has_no_steps(arguments, reason) -> None:
    with pytest.raises(SpecError, match=reason) as caught:
        steps_of(Order("striped", 2), 0, [Length.of(8)], **arguments)
    assert "dual_chunk" in str(caught.value)


def test_lengths_and_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SpecError, match=r"10 positions.* multiples of 4; pad it to 12"):
        steps_of(Order("dual_chunk", 2), 0, [Length.of(10)])
    with pytest.raises(SpecError, match="rank=2 of 2"):
        steps_of(Order("dual_chunk", 2), 2, [Length.of(8)])
