"""Rows of a rank's output as parts come to them: which part is the first that has a row, or the
last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .steps import Part, Span


class PartRows(NamedTuple):
    """Rows of a part's queries. new: no part before has any of them; last: some are in none behind;
    over: none is in any behind."""

    new: bool
    last: bool
    over: bool


def rows_of(parts: Sequence[Part], room: int) -> tuple[bool, list[PartRows]]:
    """Whether each row of a sequence is begun by a part all of whose rows are new, and what parts
    have of them. room: rows of the sequence, if all parts are of one, otherwise those of several
    are never known to be begun.

    Returns: the answer, and the rows of each part, in their order.
    """
    found: list[tuple[bool, bool]] = []
    behind: dict[int, list[Span]] = {}
    for part in reversed(parts):
        known = behind.setdefault(part.sequence, [])
        last, over = not _within(part.queries, known), not _meets(part.queries, known)
        known.append(part.queries)
        found.append((last, over))
    before: dict[int, list[Span]] = {}
    begun, rows = len({part.sequence for part in parts}) == 1, []
    for part, (last, over) in zip(parts, reversed(found), strict=True):
        known = before.setdefault(part.sequence, [])
        new = not _meets(part.queries, known)
        begun = begun and (new or _within(part.queries, known))
        known.append(part.queries)
        rows.append(PartRows(new, last, over))
    whole = [spans for spans in before.values() if _within(Span(0, room), spans)]
    return begun and bool(whole), rows


def _meets(span: Span, others: Iterable[Span]) -> bool:
    return any(x.begin < span.end and span.begin < x.end for x in others)


def _within(span: Span, others: Iterable[Span]) -> bool:
    """Whether others have all of it together."""
    begin = span.begin
    for x in sorted(others):
        if x.begin <= begin:
            begin = max(begin, x.end)
    return begin >= span.end
