"""Rows that parts begin and end, against a count of each."""

from __future__ import annotations

from itertools import product

from attngen.call.context.rows import rows_of
from attngen.call.context.steps import Part, Span

ROOM = 4
SPANS = [Span(a, b) for a in range(ROOM) for b in range(a + 1, ROOM + 1)]


def test_rows_are_begun_and_ended_where_a_count_says() -> None:
    for spans in product(SPANS, repeat=3):
        parts = [Part(0, x, Span(0, 1), 0, None, None) for x in spans]
        begun, found = rows_of(parts, ROOM)
        sets = [{*range(*x)} for x in spans]
        wanted = True
        for number, (own, rows) in enumerate(zip(sets, found, strict=True)):
            before, behind = (set().union(*x) for x in (sets[:number], sets[number + 1 :]))
            assert (rows.new, rows.over) == (not own & before, not own & behind)
            assert rows.last == bool(own - behind)
            wanted &= rows.new or own <= before
        assert begun == (wanted and set().union(*sets) == {*range(ROOM)})


def test_rows_of_several_sequences_are_apart() -> None:
    parts = [Part(n, Span(0, ROOM), Span(0, 1), 0, None, None) for n in (0, 1, 0)]
    begun, found = rows_of(parts, ROOM)
    assert not begun and [tuple(x) for x in found] == [
        (True, False, False),
        (True, True, True),
        (False, True, True),
    ]
