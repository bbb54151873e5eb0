"""Rounds over a ring: keys of several steps side by side, and few parts over them.

A part that joins an output reads and writes all of it, however few keys the part has. Steps that
show the same queries all of their keys are therefore one part, over keys that their messages put
side by side. In a forward most queries wait for the last of their keys, and few go on while these
are on their way; in a backward the last keys that the rank holds itself come behind all others,
while gradients of these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from .steps import Part, Span, Step

OWN = 0  # the step of a rank's own keys
MOST = 4  # steps whose keys are asked for together
WAVE = 2  # of a backward, behind the first
HELD = 7  # times the keys that a rank holds: those of others that queries wait for, at most


@dataclass(frozen=True)
class Region:
    """Keys of several steps in one piece of memory of so many tokens.

    places: of each step; the first of the rank's own keys (`OWN`), where they are there, come
    last, and a later step's before an earlier one's, so that one diagonal runs through all.
    """

    places: dict[int, Span]
    tokens: int


@dataclass(frozen=True)
class Round:
    """Parts that a rank computes once the messages of some steps are there.

    steps: these, the same ones for all ranks; region: it holds the keys of its parts, None for the
    rank's own where they are; parts: of the rank's queries, and of keys in the region.
    """

    steps: tuple[int, ...]
    region: int | None
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Rounds:
    """A direction of a rank: its own keys first, then those that come."""

    regions: tuple[Region, ...]
    rounds: tuple[Round, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All rounds' parts, in their order."""
        return tuple([part for each in self.rounds for part in each.parts])

    @property
    def cut(self) -> int:
        """The first of the queries that go on with each round."""
        first, *_ = self.parts
        return first.queries.begin


def rounds_of(plans: Sequence[Sequence[Step]], rank: int, *, going: int) -> Rounds | None:
    """The rounds of a rank; None where some rank's steps have other parts than rounds are made of:
    one a step, of one sequence, whose keys all of its queries see, but for its own keys, which a
    causal mask may hide, and whose positions they need not know.

    plans: the steps of every rank, as of `steps_of`; going: how many queries, the last ones, go on
    with the keys of each round, while those before wait for the last of theirs; 0: all go on.
    """
    if len(plans) == 1 or not all(map(_has_rounds, plans)):
        return None
    own_step, *_ = plans[rank]
    (own,) = own_step.parts
    seen = {n: part for n, step in enumerate(plans[rank]) for part in step.parts if n}
    spans = _spans_of(own, list(seen.values()), going) if going else []
    made = _Waiting(own, seen, spans) if spans else _InWaves(own, seen)
    made.add_all([*_waves(len(plans), MOST)])
    return Rounds(tuple(made.regions), tuple(made.rounds))


def backward_rounds_of(
    plans: Sequence[Sequence[Step]], rank: int, *, splits: bool
) -> Rounds | None:
    """The rounds of a rank's backward; None where `rounds_of` has none.

    plans: as there; splits: whether the second half of the rank's own keys comes last, as a round
    of its own.
    """
    if len(plans) == 1 or not all(map(_has_rounds, plans)):
        return None
    own_step, *_ = plans[rank]
    (own,) = own_step.parts
    first, last, cut = own, None, own.keys.end // 2
    if splits and cut:
        first = replace(own, keys=Span(0, cut))
        begin = own.queries.begin if own.right is None else cut
        queries, keys = Span(begin, own.queries.end), Span(cut, own.keys.end)
        last = replace(own, queries=queries, keys=keys)
    made = _InWaves(first, {n: x for n, step in enumerate(plans[rank]) for x in step.parts if n})
    made.add_all([*_waves(len(plans), WAVE)])
    if last is not None:
        made.rounds.append(Round((), None, (last,)))
    return Rounds(tuple(made.regions), tuple(made.rounds))


def _has_rounds(steps: Sequence[Step]) -> bool:
    """Whether steps are of one sequence, each one part that hides nothing, or a diagonal through
    the rank's own keys."""
    own_step, *others = steps
    if len(own_step.parts) != 1 or any(len(step.parts) > 1 for step in others):
        return False
    (own,) = own_step.parts
    if own.left is not None or own.right not in (None, 0) or own.keys.begin:
        return False
    if own.right == 0 and (own.delta or own.queries != own.keys or own.stripe > 1):
        return False
    shown = [part for step in others for part in step.parts]
    return all(
        (x.sequence, x.left, x.right, x.queries.end) == (own.sequence, None, None, own.queries.end)
        for x in shown
    )


def _waves(ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """Steps whose keys are asked for together: the first alone, since nothing but a rank's own keys
    is computed beside it, then twice as many each time, up to `most`, beside those before."""
    begin, size = 1, 1
    while begin < ranks:
        yield tuple(range(begin, min(begin + size, ranks)))
        begin, size = begin + size, min(2 * size, most)


def _spans_of(own: Part, others: Sequence[Part], going: int) -> list[Span]:
    """Queries that wait together, and last those that go on; none where nobody waits."""
    begins = {0, *(part.queries.begin for part in others)}
    end = own.queries.end
    if own.queries.begin or len(begins) > 2 or not others:
        return []
    cut = max(*begins, end - going) if len(begins) > 1 else max(0, end - going)
    edges = sorted({*begins, cut, end})
    spans = [*map(Span, edges, edges[1:])]
    waits = any(x.end <= cut and part.queries.begin <= x.begin for x in spans for part in others)
    return spans if waits else []


@dataclass(eq=False)
class _InWaves:
    """Rounds whose parts are over a wave's keys.

    own: the rank's part of its own keys; seen: that of each other step that has one.
    """

    own: Part
    seen: dict[int, Part]
    regions: list[Region] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def add_all(self, waves: Sequence[tuple[int, ...]]) -> None:
        """Add the rank's own keys, and all waves, in their order."""
        self.rounds.append(Round((), None, (self.own,)))
        for wave in waves:
            places = self._region([wave])
            groups = groupby(self._of(wave), lambda n: self.seen[n].queries)
            parts = [self._part(x, self._around(places, [*group])) for x, group in groups]
            self._add(wave, parts)

    def _of(self, wave: Sequence[int]) -> list[int]:
        """Steps of which the rank needs keys."""
        return [n for n in wave if n in self.seen]

    def _region(self, waves: Sequence[tuple[int, ...]], own: int = 0) -> dict[int, Span]:
        """A new region of these waves' keys, and so many of the rank's own behind them."""
        steps = sorted((n for wave in waves for n in self._of(wave)), reverse=True)
        sizes = {n: len(self.seen[n].keys) for n in steps} | ({OWN: own} if own else {})
        ends = [*accumulate(sizes.values(), initial=0)]
        places = dict(zip(sizes, map(Span, ends, ends[1:]), strict=False))
        *_, tokens = ends
        self.regions.append(Region(places, tokens))
        return places

    def _around(self, places: dict[int, Span], steps: Sequence[int]) -> Span:
        """The keys of steps that follow each other."""
        spans = [places[n] for n in steps]
        return Span(min(x.begin for x in spans), max(x.end for x in spans))

    def _part(self, queries: Span, keys: Span, right: int | None = None, delta: int = 0) -> Part:
        return Part(self.own.sequence, queries, keys, delta, None, right)

    def _add(self, wave: tuple[int, ...], parts: Sequence[Part]) -> None:
        self.rounds.append(Round(wave, len(self.regions) - 1, tuple(parts)))


@dataclass(eq=False)
class _Waiting(_InWaves):
    """Rounds in which the last of these spans of queries goes on, while the others wait."""

    def __init__(self, own: Part, seen: dict[int, Part], spans: Sequence[Span]) -> None:
        super().__init__(own, seen)
        *self._waits, self._goes = spans

    def add_all(self, waves: Sequence[tuple[int, ...]]) -> None:
        alone = [x for x in self._waits if not any(self._shows(n, x) for n in self.seen)]
        goes = self._over_own(self._goes, self.own.keys, self.own.keys)
        self.rounds.append(Round((), None, (goes,)))
        waits = [x for x in self._waits if x not in alone]
        own_keys = max(len(self._own_keys(x)) for x in self._waits)
        for number, group in enumerate(self._groups(waves)):
            (*_, last), first = group, number == 0
            places = self._region(group, own=own_keys if first else 0)
            ends = {x: self._last(group, x, last if first else ()) for x in waits}
            for wave in group:
                steps = self._of(wave)
                found = [self._part(self._goes, self._around(places, steps))] if steps else []
                found += [self._of_waiting(x, places) for x, end in ends.items() if end == wave]
                if first and wave == last:  # tiles of few keys fill what those of many leave
                    own = places[OWN]
                    found += [self._over_own(x, own, own) for x in alone]
                self._add(wave, found)

    def _last(
        self, group: Sequence[tuple[int, ...]], queries: Span, none: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The last wave of a group that shows these queries anything."""
        shown = [wave for wave in group if any(self._shows(n, queries) for n in self._of(wave))]
        return max(shown, default=none)

    def _of_waiting(self, queries: Span, places: dict[int, Span]) -> Part:
        """The part of queries that waited, over what a region has for them."""
        steps = [n for n in places if n != OWN and self._shows(n, queries)]
        if OWN not in places:
            return self._part(queries, self._around(places, steps))
        own = places[OWN]
        begin = min([places[n].begin for n in steps], default=own.begin)
        return self._over_own(queries, Span(begin, own.end), own)

    def _over_own(self, queries: Span, keys: Span, own: Span) -> Part:
        """The part of queries and keys of which the last are the rank's own, which begin there."""
        end = own.begin + len(self._own_keys(queries))
        right = self.own.right
        delta = 0 if right is None else own.begin - keys.begin + queries.begin
        return self._part(queries, Span(keys.begin, end), right, delta)

    def _own_keys(self, queries: Span) -> Span:
        """The rank's own keys that some of these queries see."""
        return self.own.keys if self.own.right is None else Span(0, queries.end)

    def _shows(self, step: int, queries: Span) -> bool:
        """Whether a step shows its keys to these queries."""
        return self.seen[step].queries.begin <= queries.begin

    def _groups(self, waves: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Waves whose keys are in one region: as many as queries wait for, then each its own."""
        group: list[tuple[int, ...]] = []
        held, most = 0, HELD * len(self.own.keys)
        for number, wave in enumerate(waves, 1):
            group.append(wave)
            held += self._waited(wave)
            behind = [*map(self._waited, waves[number:])]
            if not any(behind) or held + next(iter(behind)) > most:
                yield group
                group, held = [], 0

    def _waited(self, wave: Sequence[int]) -> int:
        """Keys of a wave that queries wait for."""
        steps = [n for n in self._of(wave) if any(self._shows(n, x) for x in self._waits)]
        return sum(len(self.seen[n].keys) for n in steps)
