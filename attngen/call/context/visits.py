"""Steps of all ranks at once, for programs that every rank runs alike: what differs are tables.

A visit is a step of a ring, or the whole where keys are gathered. Which parts a rank computes is
one of few branches, and a message has one size for all; ranks look both up by their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from ..table import Sides
from .order import Order
from .steps import Length, Part, Span, parts_over_all, steps_of

Parts = tuple[Part, ...]


class Bands(NamedTuple):
    """Arguments that decide which keys a query sees, as of `attngen.attention`."""

    mask: str = "none"
    window: Sides = (-1, -1)
    bottom_right: bool | None = None


@dataclass(frozen=True)
class Visit:
    """A step of all ranks.

    branches: parts, of which a rank computes branches[which[rank]]: their queries are tokens that
    it holds, their keys tokens that are at hand. pairs: (source, reader) of each message that is
    needed. rows: of each source, the tokens of its keys that it sends, as many for all, of which
    those behind its own are filling and no token; None where it sends all.
    """

    branches: tuple[Parts, ...]
    which: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    rows: tuple[tuple[int, ...], ...] | None = None


def spans_of(parts: Sequence[Part], count: int) -> list[Span]:
    """The keys that parts read of each of so many sequences, from the first to the last."""
    found = [Span(0, 0)] * count
    for part in parts:
        known = found[part.sequence]
        if len(known):
            begin, end = min(known.begin, part.keys.begin), max(known.end, part.keys.end)
            found[part.sequence] = Span(begin, end)
        else:
            found[part.sequence] = part.keys
    return found


def relative(part: Part, spans: Sequence[Span]) -> Span:
    """A part's keys, counted from where those begin that are at hand."""
    begin = spans[part.sequence].begin
    return Span(part.keys.begin - begin, part.keys.end - begin)


@lru_cache(256)
def ring_of(
    order: Order, lengths: tuple[Length, ...], bands: Bands, by_position: bool
) -> tuple[Visit, ...]:
    """The visits of a ring: each rank's own keys, then those of the rank before it, and so on;
    those of which nobody sees anything are left out.

    lengths: of each packed sequence, or of all of a batch alike. by_position: as of `steps_of`.
    Raises: SpecError, as that.
    """
    ranks = range(order.ranks)
    given = bands._asdict()
    plans = [steps_of(order, r, lengths, by_position=by_position, **given) for r in ranks]
    tokens = sum(x.room_kv for x in lengths) // order.ranks
    found = []
    for number in ranks:
        parts = [plan[number].parts for plan in plans]
        spans = [spans_of(each, len(lengths)) for each in parts]
        size = max(sum(map(len, each)) for each in spans)
        if not size:
            continue
        held = _Held(order, lengths, by_position)
        whole = number == 0 or size == tokens
        at_hand = [None if whole else each for each in spans]
        branches = [held.at_hand(*each) for each in zip(parts, at_hand, strict=True)]
        readers = [(rank + number) % order.ranks for rank in ranks]
        pairs = [(rank, reader) for rank, reader in zip(ranks, readers, strict=True)]
        rows = None
        if not whole:
            rows = tuple(held.rows(spans[reader], size, tokens) for reader in readers)
        needed = tuple((source, reader) for source, reader in pairs if number and parts[reader])
        found.append(_branched(branches, needed, rows))
    return tuple(found)


@lru_cache(256)
def gathered_of(
    order: Order, lengths: tuple[Length, ...], bands: Bands, by_position: bool
) -> Visit:
    """The one visit of ranks that have the keys of all, in the order of their sequences. Arguments
    as of `ring_of`. Raises: SpecError, also in order `striped`."""
    held = _Held(order, lengths, by_position)
    given = bands._asdict()
    parts = [parts_over_all(order, r, lengths, **given) for r in range(order.ranks)]
    return _branched([held.over_all(each) for each in parts], (), None)


def _branched(
    parts: Iterable[Parts],
    pairs: tuple[tuple[int, int], ...],
    rows: tuple[tuple[int, ...], ...] | None,
) -> Visit:
    """The visit of ranks that compute these parts each."""
    places: dict[Parts, int] = {}
    which = tuple([places.setdefault(each, len(places)) for each in parts])
    return Visit(tuple(places), which, pairs, rows)


@dataclass(frozen=True)
class _Held:
    """Where ranks hold sequences: one behind the other, each rank as much of one as any."""

    order: Order
    lengths: tuple[Length, ...]
    by_position: bool

    def _begins(self, rooms: Iterable[int], ranks: int) -> list[int]:
        return [*accumulate((room // ranks for room in rooms), initial=0)]

    def at_hand(self, parts: Parts, spans: Sequence[Span] | None) -> Parts:
        """Parts over the tokens of a rank and a message. spans: the message's, None for all."""
        if spans is None:
            rooms = (x.room_kv for x in self.lengths)
            keys = self._begins(rooms, self.order.ranks)
            return self._placed(parts, [part.keys for part in parts], keys)
        keys = [*accumulate(map(len, spans), initial=0)]
        return self._placed(parts, [relative(part, spans) for part in parts], keys)

    def over_all(self, parts: Parts) -> Parts:
        """Parts over the tokens of a rank and of all keys."""
        keys = self._begins((x.room_kv for x in self.lengths), 1)
        return self._placed(parts, [part.keys for part in parts], keys)

    def _placed(self, parts: Parts, spans: Sequence[Span], begins: Sequence[int]) -> Parts:
        queries = self._begins((x.room_q for x in self.lengths), self.order.ranks)
        found = []
        for part, span in zip(parts, spans, strict=True):
            moved = replace(
                part,
                queries=_moved(part.queries, queries[part.sequence]),
                keys=_moved(span, begins[part.sequence]),
            )
            if not self.by_position:  # parts that differ in nothing else are one
                cut = part.left is not None or part.right is not None
                moved = replace(moved, origin=None, delta=part.delta if cut else 0)
            found.append(moved)
        return tuple(found)

    def rows(self, spans: Sequence[Span], size: int, tokens: int) -> tuple[int, ...]:
        """The tokens of a source that a message of that size has."""
        begins = self._begins((x.room_kv for x in self.lengths), self.order.ranks)
        moved = (_moved(span, begin) for span, begin in zip(spans, begins, strict=False))
        own = [*chain.from_iterable(range(*each) for each in moved if len(each))]
        return (*own, *range(tokens, tokens + size - len(own)))


def _moved(span: Span, by: int) -> Span:
    return Span(span.begin + by, span.end + by)
