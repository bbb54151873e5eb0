"""Launches over a group: parts that one call of packed tokens attends to, each as a sequence.

Parts of several sequences, or of several ranges of one's queries, differ in where their queries and
keys lie, in their lengths and in their diagonals, all of which such a call has for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

from .rows import PartRows, rows_of
from .steps import Band, Part, Span

KEEPS, ROUNDS = 1, 2  # marks of `attngen::forward_onto`
Sides = tuple[int, int]


class Place(NamedTuple):
    """Where a part stands: its first query and key, the key on the first query's diagonal, and its
    sequence."""

    query: int
    key: int
    diagonal: int
    sequence: int


class Begins(NamedTuple):
    """The tokens at which position 0 of each sequence lies, of queries, and of keys at hand, where
    it may be before the first one."""

    queries: Sequence[int]
    keys: Sequence[int]


@dataclass(frozen=True, eq=False)
class Launch:
    """Parts of one call of packed tokens.

    queries, keys: their tokens, those of queries in order and none in two; window: sides about each
    diagonal, −1 for none; places: of each, None where all diagonals begin at the first query and
    key. marks: of each, what is written of its rows. One that is made has an identity of its own.
    """

    parts: tuple[Part, ...]
    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    window: Sides
    places: tuple[Place, ...] | None
    marks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Form:
    """How parts may be put together.

    band: sides about the diagonal of the whole; by_position: whether parts say where they stand.
    placed: whether a call may have diagonals for each sequence; apart: whether no key may be in two
    parts of a launch, as gradients want it, and the reference.
    """

    band: Band
    by_position: bool = False
    placed: bool = True
    apart: bool = False


@dataclass
class _Open:
    """A launch that may get more parts: by what they are alike, and where they lie."""

    like: object
    parts: list[Part] = field(default_factory=list)
    queries: list[Span] = field(default_factory=list)
    keys: list[Span] = field(default_factory=list)


def launches_of(parts: Sequence[Part], begins: Begins, form: Form) -> tuple[Launch, ...]:
    """Put parts into few launches, whose order does not matter. begins: of the tokens at hand."""
    placed = [(_moved(part.queries, begins.queries[part.sequence]), part) for part in parts]
    found: list[_Open] = []
    for queries, part in sorted(placed, key=itemgetter(0)):
        keys, like = _moved(part.keys, begins.keys[part.sequence]), _likeness(part, form)
        into = next((x for x in found if x.like == like and _takes(x, queries, keys, form)), None)
        if into is None:
            found.append(into := _Open(like))
        into.parts.append(part)
        into.queries.append(queries)
        into.keys.append(keys)
    return tuple([_closed(each, form) for each in found])


def marked(steps: Sequence[Sequence[Launch]]) -> list[tuple[Launch, ...]]:
    """Launches of steps, one after another, with marks of what each writes of its rows: sums where
    others go on from these, rounded ones where none does."""
    parts = [part for launches in steps for each in launches for part in each.parts]
    _, rows = rows_of(parts, 0)
    known = iter(rows)
    return [
        tuple([replace(x, marks=tuple([_mark(next(known)) for _ in x.parts])) for x in launches])
        for launches in steps
    ]


def covers(steps: Sequence[Sequence[Launch]], tokens: int) -> bool:
    """Whether each of a rank's tokens is among the queries of some launch."""
    end = 0
    for span in sorted(span for launches in steps for each in launches for span in each.queries):
        if span.begin > end:
            return False
        end = max(end, span.end)
    return end >= tokens


def _mark(rows: PartRows) -> int:
    return (0 if rows.over else KEEPS) | (ROUNDS if rows.last else 0)


def _moved(span: Span, by: int) -> Span:
    return Span(span.begin + by, span.end + by)


def _takes(launch: _Open, queries: Span, keys: Span, form: Form) -> bool:
    """Whether a part follows those of a launch, whose workspaces are in the order of tokens."""
    (*_, last), (*_, last_keys) = launch.queries, launch.keys
    return last.end <= queries.begin and (not form.apart or last_keys.end <= keys.begin)


def _hides(part: Part) -> bool:
    return part.left is not None or part.right is not None


def _likeness(part: Part, form: Form) -> object:
    """Find what parts of a launch have in common: a window; or the band, where each has a diagonal,
    of which parts that hide nothing and know none may have any that shows all."""
    if not form.placed:
        return part.window
    return form.by_position or form.band.left is None or _hides(part)


def _closed(launch: _Open, form: Form) -> Launch:
    """The launch with the window of all its parts, and with places, if these need any."""
    parts = tuple(launch.parts)
    first, *others = [part.window for part in parts]
    spans = tuple(launch.queries), tuple(launch.keys)
    if not form.by_position and all(window == first for window in others):
        return Launch(parts, *spans, first, None)
    left, right = (-1 if side is None else side for side in form.band)
    return Launch(parts, *spans, (left, right), tuple([_place(part, form) for part in parts]))


def _place(part: Part, form: Form) -> Place:
    shown = not (form.by_position or _hides(part))
    delta = len(part.keys) if shown else part.delta
    query, key = part.origin if form.by_position and part.origin is not None else (0, 0)
    return Place(query, key, delta, part.sequence)
