"""Orders of context parallelism: every position on one rank, and back again."""

from __future__ import annotations

import pytest

from attngen.call.context.order import Order
from attngen.errors import SpecError

EACH = [
    *(Order(name, ranks) for name in ("dual_chunk", "contiguous") for ranks in (1, 2, 3, 8)),
    *(Order("striped", ranks, stripe) for ranks in (1, 2, 3) for stripe in (1, 4)),
]


@pytest.mark.parametrize("order", EACH, ids=str)
def test_ranks_hold_each_token_once_and_as_many(order: Order) -> None:
    rooms = [2 * order.multiple, 0, order.multiple]
    tokens = [f"{b}:{p}" for b, room in enumerate(rooms) for p in range(room)]
    held = [[tokens[x] for x in order.shard(rank, rooms)] for rank in range(order.ranks)]
    assert {len(each) for each in held} == {len(tokens) // order.ranks}
    for rank, each in enumerate(held):
        assert [int(x.partition(":")[2]) for x in each] == order.positions(rank, rooms)
    gathered = [x for each in held for x in each]
    assert [gathered[place] for place in order.unshard(rooms)] == tokens


@pytest.mark.parametrize("order", EACH, ids=str)
def test_positions_in_use_are_the_first_that_a_rank_holds(order: Order) -> None:
    room = 3 * order.multiple
    for rank in range(order.ranks):
        positions = order.positions(rank, [room])
        for length in range(room + 1):
            count = order.used(rank, room, length)
            assert [p for p in positions if p < length] == positions[:count]


def test_each_order_is_what_its_name_says() -> None:
    assert Order("contiguous", 2).positions(1, [8]) == [4, 5, 6, 7]
    assert Order("dual_chunk", 2).positions(0, [8]) == [0, 1, 6, 7]
    assert Order("dual_chunk", 2).runs(1, 8) == (range(2, 6),), "which follow each other"
    assert Order("striped", 2).positions(1, [8]) == [1, 3, 5, 7]
    assert Order("striped", 2, 2).positions(1, [8]) == [2, 3, 6, 7]
    assert Order("dual_chunk", 2).shard(0, [4, 8]) == [0, 3, 4, 5, 10, 11]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("zigzag", 2), "known: dual_chunk"),
        (("dual_chunk", 0), "ranks=0"),
        (("dual_chunk", 2, 2), "stripe=2"),
        (("striped", 2, 0), "stripe=0"),
    ],
)
def test_an_order_that_there_is_not_is_refused(arguments, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        Order(*arguments)
