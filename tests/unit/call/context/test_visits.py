"""Visits of all ranks: by tables, each visible pair is computed once, of keys that were sent."""

from __future__ import annotations

import pytest
import torch

from attngen.call.context.order import Order
from attngen.call.context.steps import Length
from attngen.call.context.visits import Bands, Visit, gathered_of, ring_of
from attngen.reference.masks import visible

CAUSAL, WINDOW = Bands("causal"), Bands("causal", (3, 0))
CASES = [
    (Order("dual_chunk", 4), CAUSAL),
    (Order("contiguous", 4), WINDOW),
    (Order("dual_chunk", 3), Bands("none", (2, 5))),
    (Order("striped", 4), CAUSAL),
]


def at_hand(visit: Visit, order: Order, rank: int, number: int, rooms: list[int]) -> list[int]:
    """The tokens of the whole that a rank has at a visit, -1 for filling."""
    if number == 0:
        return order.shard(rank, rooms)
    sources = [source for source, reader in visit.pairs if reader == rank]
    if not sources:
        return []
    (source,) = sources
    held = order.shard(source, rooms)
    if visit.rows is None:
        return held
    return [held[row] if row < len(held) else -1 for row in visit.rows[source]]


def counted(visit: Visit, rank: int, queries: list[int], keys: list[int], pairs: torch.Tensor):
    """Add the pairs that a rank computes of these tokens."""
    for part in visit.branches[visit.which[rank]]:
        rows, columns = queries[slice(*part.queries)], keys[slice(*part.keys)]
        seen = visible(len(rows), len(columns), window=part.window)
        pairs[torch.tensor(rows)[:, None], torch.tensor(columns)] += seen.int()


@pytest.mark.parametrize(("order", "bands"), CASES, ids=str)
def test_pairs_are_those_of_one_call(order: Order, bands: Bands) -> None:
    rooms = [2 * order.multiple, order.multiple]
    lengths = tuple(Length(n, n, n - 1, n - 1) for n in rooms)
    wanted = torch.zeros(sum(rooms), sum(rooms), dtype=torch.int32)
    for first, n in ((0, rooms[0] - 1), (rooms[0], rooms[1] - 1)):
        own = visible(n, n, mask=bands.mask, window=bands.window)
        wanted[first : first + n, first : first + n] = own.int()
    ring, gathered = torch.zeros_like(wanted), torch.zeros_like(wanted)
    for rank in range(order.ranks):
        held = order.shard(rank, rooms)
        for visit in ring_of(order, lengths, bands, False):
            number = 0 if not visit.pairs else (visit.pairs[0][1] - visit.pairs[0][0]) % order.ranks
            counted(visit, rank, held, at_hand(visit, order, rank, number, rooms), ring)
        if order.name != "striped":
            whole = [*range(sum(rooms))]
            counted(gathered_of(order, lengths, bands, False), rank, held, whole, gathered)
    assert torch.equal(ring, wanted)
    assert order.name == "striped" or torch.equal(gathered, wanted)


def test_messages_hold_what_is_seen() -> None:
    order, (length,) = Order("contiguous", 4), (Length.of(64),)
    own, halo = ring_of(order, (length,), Bands("causal", (5, 0)), False)
    assert own.pairs == () and halo.pairs == ((0, 1), (1, 2), (2, 3))
    assert halo.rows is not None and halo.rows[0] == (11, 12, 13, 14, 15)
    assert len(own.branches) == 1 and len(halo.branches) == 2
    balanced = ring_of(Order("dual_chunk", 4), (length,), CAUSAL, False)
    assert [len(visit.branches) for visit in balanced] == [1, 2, 2, 2]
