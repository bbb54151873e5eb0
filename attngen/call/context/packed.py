"""Plans of packed sequences: the launches of a rank's steps, and the tokens that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from .launches import Begins, Form, Launch, covers, launches_of, marked
from .order import Order
from .steps import Length, Part, Span, Step
from .visits import spans_of

Runs = tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class Together:
    """A rank's launches.

    forward, backward: of each step. covered: whether every row is in some launch. used: tokens of
    queries that are in use.
    """

    forward: tuple[tuple[Launch, ...], ...]
    backward: tuple[tuple[Launch, ...], ...]
    covered: bool
    used: Runs


@dataclass(frozen=True, eq=False)
class Sent:
    """Tokens of keys that go from one rank to another at a step: those of the sender, in order, all
    that it holds if `whole`."""

    runs: Runs
    tokens: int
    whole: bool


def begins_of(rooms: Sequence[int], share: int) -> list[int]:
    """The first token of each sequence, of which there is one part in so many; last their end."""
    return [*accumulate((room // share for room in rooms), initial=0)]


def sent_of(parts: Sequence[Part], lengths: Sequence[Length], ranks: int) -> Sent:
    """The tokens of keys that a step's parts read."""
    begins = begins_of([x.room_kv for x in lengths], ranks)
    spans = spans_of(parts, len(lengths))
    moved = [_moved(span, begin) for span, begin in zip(spans, begins, strict=False) if len(span)]
    tokens, (*_, held) = sum(map(len, moved)), begins
    return Sent(_joined(moved), tokens, tokens == held)


def around(
    order: Order,
    rank: int,
    plans: Sequence[Sequence[Step]],
    lengths: tuple[Length, ...],
    form: Form,
) -> Together:
    """The launches of a rank to which keys come step by step, its own first."""
    n, steps = order.ranks, plans[rank]
    queries = begins_of([x.room_q for x in lengths], n)
    own = begins_of([x.room_kv for x in lengths], n)
    begins = [Begins(queries, own)]
    for step in steps[1:]:
        spans = spans_of(step.parts, len(lengths))
        at_hand = accumulate(map(len, spans), initial=0)
        places = [at - span.begin for at, span in zip(at_hand, spans, strict=False)]
        begins.append(Begins(queries, places))
    parts = [step.parts for step in steps]
    return _together(order, rank, parts, begins, lengths, form)


def over_all(
    order: Order, rank: int, parts: Sequence[Part], lengths: tuple[Length, ...], form: Form
) -> Together:
    """The launches of a rank that has the keys of all, in the order of their sequences."""
    queries = begins_of([x.room_q for x in lengths], order.ranks)
    begins = Begins(queries, begins_of([x.room_kv for x in lengths], 1))
    return _together(order, rank, [parts], [begins], lengths, form)


def _together(
    order: Order,
    rank: int,
    parts: Sequence[Sequence[Part]],
    begins: Sequence[Begins],
    lengths: tuple[Length, ...],
    form: Form,
) -> Together:
    """The launches of parts of each step, and of the gradients that they make."""
    pairs = [*zip(parts, begins, strict=True)]
    forward = tuple(marked([launches_of(*each, form) for each in pairs]))
    apart = Form(form.band, form.by_position, form.placed, apart=True)
    backward = tuple(launches_of(*each, apart) for each in pairs)
    (first, *_), spans = begins, (Span(0, order.used(rank, x.room_q, x.q)) for x in lengths)
    *starts, tokens = first.queries
    used = [_moved(span, at) for span, at in zip(spans, starts, strict=True) if len(span)]
    return Together(forward, backward, covers(forward, tokens), _joined(used))


def tokens_of_runs(runs: Runs) -> list[int]:
    """Each token of runs."""
    return [*chain.from_iterable(range(*run) for run in runs)]


def _moved(span: Span, by: int) -> Span:
    return Span(span.begin + by, span.end + by)


def _joined(spans: Sequence[Span]) -> Runs:
    """Spans in order, as few as can be."""
    found: list[Span] = []
    for span in spans:
        before = found.pop() if found and found[len(found) - 1].end == span.begin else None
        found.append(span if before is None else Span(before.begin, span.end))
    return tuple(found)
