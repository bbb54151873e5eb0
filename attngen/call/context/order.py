"""Orders of context parallelism: which positions of each sequence a rank holds, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal, get_args

from ...errors import SpecError
from ...io.text import suggestion

OrderName = Literal["dual_chunk", "contiguous", "striped"]
ORDERS: tuple[OrderName, ...] = get_args(OrderName)
AnyOrder = OrderName | tuple[OrderName, int]  # beside striped, positions of a stripe


@dataclass(frozen=True)
class Order:
    """How `ranks` ranks hold the positions of a sequence, each rank as many.

    contiguous: a sequence is cut into one chunk a rank. dual_chunk: into two a rank, of which rank
    r holds chunks r and 2 · ranks − 1 − r, in this order, so that under a causal mask all ranks
    have equal work. striped: position p is on rank ⌊p / stripe⌋ mod ranks.

    Raises: SpecError where there is no such order.
    """

    name: OrderName
    ranks: int
    stripe: int = 1

    def __post_init__(self) -> None:
        reasons = []
        if self.name not in ORDERS:
            meant = suggestion(self.name, ORDERS)
            reasons.append(f"order={self.name!r}; known: {', '.join(ORDERS)}{meant}")
        if self.ranks < 1:
            reasons.append(f"ranks={self.ranks}: at least one holds a sequence")
        if self.stripe < 1 or (self.stripe > 1 and self.name != "striped"):
            reasons.append(f"stripe={self.stripe}: at least 1, and 1 but in order 'striped'")
        if reasons:
            raise SpecError(reasons)

    @property
    def multiple(self) -> int:
        """Number of positions that the length of a sequence is a multiple of."""
        return self.ranks * {"dual_chunk": 2, "contiguous": 1, "striped": self.stripe}[self.name]

    def check(self, rooms: Iterable[int]) -> None:
        """Raises: SpecError where a sequence of such a length cannot be cut."""
        odd = dict.fromkeys(room for room in rooms if room % self.multiple)
        reasons = [
            f"a sequence of {room} positions: order {self.name!r} over {self.ranks} ranks cuts "
            f"multiples of {self.multiple}; pad it to {-(-room // self.multiple) * self.multiple}"
            for room in odd
        ]
        if reasons:
            raise SpecError(reasons)

    def runs(self, rank: int, room: int) -> tuple[range, ...]:
        """Positions that a rank holds of a sequence, in the order in which it does: runs of as many
        as follow each other.

        room: the sequence's length, padding included. Raises: SpecError where it cannot be cut.
        """
        self.check((room,))
        if not room:
            return ()
        if self.name == "striped":
            firsts = range(rank * self.stripe, room, self.ranks * self.stripe)
            found = [range(first, first + self.stripe) for first in firsts]
            return tuple(found) if self.ranks > 1 else (range(room),)
        count = self.multiple
        size, other = room // count, count - 1 - rank
        if self.name == "contiguous":
            return (range(rank * size, (rank + 1) * size),)
        if other == rank + 1:  # which follow each other
            return (range(rank * size, (other + 1) * size),)
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, other))

    def positions(self, rank: int, rooms: Sequence[int]) -> list[int]:
        """The position in its own sequence of each token that a rank holds of packed sequences, or
        of one dense one. rooms: their lengths, padding included. Raises: SpecError."""
        return [*chain.from_iterable(run for room in rooms for run in self.runs(rank, room))]

    def shard(self, rank: int, rooms: Sequence[int]) -> list[int]:
        """The place among all tokens of each token that a rank holds, in the rank's order: the
        index by which a whole tensor gives the rank's. rooms: as of `positions`."""
        return [*chain.from_iterable(self._runs_of_tokens(rank, rooms))]

    def unshard(self, rooms: Sequence[int]) -> list[int]:
        """The place of each token among those of all ranks, one rank behind the other, as a gather
        leaves them: the index by which these give the whole tensor. rooms: as of `positions`."""
        held = chain.from_iterable(self.shard(rank, rooms) for rank in range(self.ranks))
        places = [0] * sum(rooms)
        for place, token in enumerate(held):
            places[token] = place
        return places

    def used(self, rank: int, room: int, length: int) -> int:
        """How many of the first `length` positions a rank holds, which are the first that it does.
        room: the sequence's length, padding included."""
        if self.name == "striped":
            full, rest = divmod(length, self.multiple)
            own = rest - rank * self.stripe
            return full * self.stripe + min(max(own, 0), self.stripe)
        return sum(max(0, min(run.stop, length) - run.start) for run in self.runs(rank, room))

    def _runs_of_tokens(self, rank: int, rooms: Sequence[int]) -> Iterator[range]:
        """Runs of tokens that a rank holds."""
        for first, room in zip(accumulate(rooms, initial=0), rooms, strict=False):
            for run in self.runs(rank, room):
                yield range(first + run.start, first + run.stop)


def order_of(order: AnyOrder, ranks: int) -> Order:
    """The order of so many ranks. Raises: SpecError where there is none of that name."""
    name, stripe = (order, 1) if isinstance(order, str) else order
    return Order(name, ranks, stripe)
