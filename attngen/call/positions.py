"""Where the queries and keys of a call stand in the sequences that these are parts of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .fragments import SLOTS

# Positions, heads and sequences are below it, diagonals between both: masks add a window to them,
# which may be 2^30, in 32 bits.
LIMIT = 1 << 29


PLACED = ("query", "key", "diagonal", "sequence")  # numbers of a sequence, in their order
PLACES = len(PLACED)
# Where operations take them: no fragment is beside positions that has operands.
PLACES_SLOT, *_ = SLOTS


class Positions(NamedTuple):
    """The places of a call's first query, key, head and sequence among those of the whole.

    query, key: positions of the first ones, which decide what dropout drops. diagonal: the key on
    the first query's diagonal, counted from the first key, which masks, windows and ALiBi follow.
    head, sequence: of dropout.
    """

    query: int
    key: int
    diagonal: int
    head: int = 0
    sequence: int = 0

    @classmethod
    def of(cls, given: Sequence[Any]) -> Positions:
        """The positions that a call gives: two numbers to five, of which the third is the first
        less the second where it is missing."""
        query, key, *rest = given
        return cls(query, key, *(rest or (query - key,)))

    @classmethod
    def read(cls, words: str) -> Positions:
        """The positions that operations are told, in words that are not empty."""
        return cls(*map(int, words.split()))

    @property
    def words(self) -> str:
        """The positions as operations take them."""
        return " ".join(map(str, self))

    @property
    def numbers(self) -> dict[str, int | float]:
        """The numbers that kernels are told."""
        return {
            "diagonal": self.diagonal,
            "first_query": self.query,
            "first_key": self.key,
            "first_head": self.head,
            "first_sequence": self.sequence,
        }


def is_within(name: str, x: int) -> bool:
    """Whether kernels count this far. name: a field of `Positions`."""
    return (-LIMIT if name == "diagonal" else 0) <= x < LIMIT


def fault_of(given: Any) -> str | None:
    """Why a call cannot give this as its positions; None where it can."""
    if isinstance(given, (tuple, list)) and 2 <= len(given) <= len(Positions._fields):
        if all(isinstance(x, int) and not isinstance(x, bool) for x in given):
            if all(is_within(*each) for each in Positions.of(given)._asdict().items()):
                return None
    return (
        f"positions needs (query, key), ints from 0 to 2^29 - 1, or these with a diagonal, a first "
        f"head and a first sequence behind them; got {given!r}. Pass where the first query and the "
        "first key stand in their sequences."
    )
