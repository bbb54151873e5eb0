"""Steps of context parallelism: which of a rank's queries see which keys of each rank.

A plan is arithmetic on lengths: no tensor, device or message is known here. Every strategy that
leaves heads whole follows it, since it says which keys a rank needs at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ...errors import SpecError
from ...spec.masks import Masks, band_of, masks_of
from ..table import Sides
from .order import Order


class Length(NamedTuple):
    """Lengths of one sequence: the positions of its queries and keys that ranks hold, padding
    included, and those in use, which are the first ones."""

    room_q: int
    room_kv: int
    q: int
    kv: int

    @classmethod
    def of(cls, room: int) -> Length:
        """The lengths of a sequence that attends to itself, without padding."""
        return cls(room, room, room, room)


class _Ends(NamedTuple):
    """Where a span begins, and before which position it ends."""

    begin: int
    end: int


class Span(_Ends):
    """Positions from one to before another, as a rank holds them of a sequence."""

    __slots__ = ()

    @classmethod
    def _make(cls, iterable: Iterable[int]) -> Span:  # type: ignore[override]  # named otherwise
        return cls(*iterable)  # torch.compile calls it; that of tuples counts by __len__

    def __len__(self) -> int:
        return max(0, self.end - self.begin)


class Origin(NamedTuple):
    """Where queries and keys begin in their sequence."""

    query: int
    key: int


@dataclass(frozen=True)
class Part:
    """Queries and keys of one sequence, of which every query and every key is in a visible pair.

    sequence: its place in the batch; queries: of the rank's; keys: of the source's. Query i of
    these has key i + delta on its diagonal, counted from where both begin, and sees keys from left
    before to right behind it, as whole stripes: key j where ⌊j / stripe⌋ ≤ ⌊(i + delta + right) /
    stripe⌋. None: on that side nothing is hidden. origin: where both begin, if all their positions
    follow each other; None where they do not.
    """

    sequence: int
    queries: Span
    keys: Span
    delta: int
    left: int | None
    right: int | None
    stripe: int = 1
    origin: Origin | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The sides of a window over the part alone whose diagonal begins at its first query and
        key, −1 for none: what `attention(window=…)` takes, where stripes are of one position."""
        left = -1 if self.left is None else self.left - self.delta
        right = -1 if self.right is None else self.right + self.delta
        return left, right


@dataclass(frozen=True)
class Step:
    """One step of a rank.

    source: the rank whose keys it sees. message: whether these are another's, and needed. travels:
    whether in a ring, where the keys of a step come from the rank before, a message is needed, for
    this rank or for those behind it.
    """

    source: int
    parts: tuple[Part, ...]
    message: bool
    travels: bool


class Band(NamedTuple):
    """Keys before and behind a query's diagonal that it sees, None for all."""

    left: int | None
    right: int | None


def steps_of(
    order: Order,
    rank: int,
    lengths: Sequence[Length],
    *,
    mask: str = "none",
    window: Sides = (-1, -1),
    bottom_right: bool | None = None,
    by_position: bool = False,
) -> tuple[Step, ...]:
    """The steps of a rank, one a source: its own keys, then those of the ranks before it, the
    nearest first, as a ring brings them.

    lengths: of each sequence. mask, window, bottom_right: as of `attngen.attention`; masks but the
    causal one hide some of the pairs that parts have, as in one call over the whole. by_position:
    whether each part has an origin, which ALiBi, dropout, biases and such masks ask for; otherwise
    runs of positions are joined where one diagonal serves them.

    Raises: SpecError, where the order cannot cut the lengths, or has no steps under the mask.
    """
    order.check({length.room_q for length in lengths} | {length.room_kv for length in lengths})
    masks, aligned = masks_of(mask), is_aligned(mask, bottom_right)
    band = Band(*band_of(mask, window))
    if not 0 <= rank < order.ranks:
        raise SpecError(f"rank={rank} of {order.ranks}")
    if order.name == "striped":
        _check_stripes(masks, window, aligned, by_position)

    def pairs(of: int, source: int) -> Iterator[_Pair]:
        for place, length in enumerate(lengths):
            yield _Pair(order, of, source, place, length, band, aligned)

    steps = []
    for step in range(order.ranks):
        source = (rank - step) % order.ranks
        own = tuple(part for pair in pairs(rank, source) for part in pair.parts(by_position))
        behind = ((rank + hops) % order.ranks for hops in range(1, order.ranks - step) if step)
        later = (pair.sees for each in behind for pair in pairs(each, source))
        travels = bool(step) and (bool(own) or any(later))
        steps.append(Step(source, own, bool(step and own), travels))
    return tuple(steps)


def parts_over_all(
    order: Order,
    rank: int,
    lengths: Sequence[Length],
    *,
    mask: str = "none",
    window: Sides = (-1, -1),
    bottom_right: bool | None = None,
) -> tuple[Part, ...]:
    """The parts of a rank that has the keys of all, in the order of their sequences: one for each
    run of its queries that sees any, with an origin; `keys` are ranges of a sequence.

    Arguments as of `steps_of`. Raises: SpecError, also in order `striped`.
    """
    order.check({length.room_q for length in lengths})
    if order.name == "striped" and order.ranks > 1:
        raise SpecError("order 'striped' has no runs of positions. Use comm='p2p' or 'a2a'.")
    aligned, band = is_aligned(mask, bottom_right), Band(*band_of(mask, window))
    found = []
    for place, length in enumerate(lengths):
        pair = _Pair(order, rank, rank, place, length, band, aligned)
        keys = _Run(0, 0, length.kv)
        delta = length.kv - length.q if aligned else 0
        for run in _runs(order, rank, length.room_q, length.q):
            cut = _cut(run.size, length.kv, run.position + delta, band)
            if cut is not None:
                found.append(pair.alone(run, keys, cut))
    return tuple(found)


def is_aligned(mask: str, bottom_right: bool | None) -> bool:
    """Whether the diagonal ends at the bottom right: as a call says, or else its mask."""
    return masks_of(mask).bottom_right if bottom_right is None else bottom_right


def _check_stripes(masks: Masks, window: Sides, aligned: bool, by_position: bool) -> None:
    """Raises: SpecError where stripes have no part for what a call asks."""
    asked = {
        f"mask={masks.name!r}": bool({*masks.fragments} - {"causal"}) or masks.arbitrary,
        f"window={window}": any(side is not None and side >= 0 for side in window),
        "an alignment to the bottom right": aligned,
        "what depends on positions (ALiBi, biases, dropout)": by_position,
    }
    reasons = [
        f"order 'striped' has no steps for {name}: its ranks hold positions that do not follow "
        "each other. Use order 'dual_chunk' or 'contiguous'."
        for name, found in asked.items()
        if found
    ]
    if reasons:
        raise SpecError(reasons)


class _Run(NamedTuple):
    """Positions in use that follow each other: where the rank holds them, where they begin in the
    sequence, and how many they are."""

    begin: int
    position: int
    size: int


class _Cut(NamedTuple):
    """Visible pairs of a rectangle of queries and keys: the least rectangle around them, with the
    diagonal and the sides in it, as `Part` has them."""

    queries: Span
    keys: Span
    delta: int
    left: int | None
    right: int | None

    @property
    def shape(self) -> tuple[Span, Span, bool, bool, int | None]:
        """Its parts that differ where others show other pairs."""
        cut = (self.left is not None, self.right is not None)
        return self.queries, self.keys, *cut, self.delta if any(cut) else None


_Seen = dict[tuple[_Run, _Run], _Cut]  # what is visible of each pair of runs, but for nothing


def _cut(queries: int, keys: int, delta: int, band: Band) -> _Cut | None:
    """Pairs that a band shows of so many queries and keys; None where there is none. delta: the key
    on the first query's diagonal."""
    left, right = band
    first = 0 if right is None else max(0, -delta - right)
    last = queries if left is None else min(queries, keys - delta + left)
    if first >= last or not keys:
        return None
    begin = 0 if left is None else max(0, first + delta - left)
    end = keys if right is None else min(keys, last + delta + right)
    delta += first - begin
    if left is not None and last - first - 1 + delta <= left:
        left = None
    if right is not None and end - begin - 1 <= delta + right:
        right = None
    return _Cut(Span(first, last), Span(begin, end), delta, left, right)


@dataclass(frozen=True)
class _Pair:
    """One sequence, of which a rank has queries and a source has keys."""

    order: Order
    rank: int
    source: int
    sequence: int
    length: Length
    band: Band
    aligned: bool

    @property
    def sees(self) -> bool:
        """Whether a query sees a key."""
        if self.order.name == "striped":
            return any(True for _ in self._of_stripes())
        return any(True for _ in self._visible())

    def parts(self, by_position: bool) -> Iterator[Part]:
        """The parts; by_position: of runs of positions, none joined."""
        if self.order.name == "striped":
            return self._of_stripes()
        seen = dict(self._visible())
        if by_position or len(seen) < 2:
            return (self.alone(a, b, cut) for (a, b), cut in seen.items())
        return iter(self._joined(seen))

    def _of_stripes(self) -> Iterator[Part]:
        """The part of positions in stripes, if there is one."""
        order, length, causal = self.order, self.length, self.band.right is not None
        queries = order.used(self.rank, length.room_q, length.q)
        keys = order.used(self.source, length.room_kv, length.kv)
        stripe = order.stripe if causal and self.rank != self.source else 1
        # A query sees the stripe of its own place from ranks before, and the one before that of
        # those behind.
        first = stripe if causal and self.rank < self.source else 0
        end = keys
        if causal:
            end = min(keys, -(-(queries - first) // stripe) * stripe)
        if first < queries and end > 0:
            right = 0 if causal and end > stripe else None
            spans = Span(first, queries), Span(0, end)
            yield Part(self.sequence, *spans, 0, None, right, stripe if right == 0 else 1)

    def _visible(self) -> Iterator[tuple[tuple[_Run, _Run], _Cut]]:
        """Pairs of runs, each with what is visible of it, but for those of which nothing is."""
        order, length = self.order, self.length
        delta = length.kv - length.q if self.aligned else 0
        queries = _runs(order, self.rank, length.room_q, length.q)
        keys = _runs(order, self.source, length.room_kv, length.kv)
        for a, b in product(queries, keys):
            cut = _cut(a.size, b.size, a.position + delta - b.position, self.band)
            if cut is not None:
                yield (a, b), cut

    def alone(self, a: _Run, b: _Run, cut: _Cut) -> Part:
        """The part of a run of queries and one of keys."""
        origin = Origin(a.position + cut.queries.begin, b.position + cut.keys.begin)
        return replace(self._part(a.begin, b.begin, cut), origin=origin)

    def _part(self, query: int, key: int, cut: _Cut) -> Part:
        """The part that a cut shows of a rectangle that begins there."""
        queries = Span(query + cut.queries.begin, query + cut.queries.end)
        keys = Span(key + cut.keys.begin, key + cut.keys.end)
        return Part(self.sequence, queries, keys, cut.delta, cut.left, cut.right)

    def _joined(self, seen: _Seen) -> list[Part]:
        """Parts that show these pairs, as few as can be: one, or one a run on either side."""
        if (whole := self._one(seen)) is not None:
            return [whole]
        found = []
        for side in (0, 1):
            parts: list[Part] = []
            for run in dict.fromkeys(pair[side] for pair in seen):
                group = {pair: cut for pair, cut in seen.items() if pair[side] == run}
                one = self._one(group)
                parts += [self.alone(*x, cut) for x, cut in group.items()] if one is None else [one]
            found.append(parts)
        return min(found, key=len)

    def _one(self, seen: _Seen) -> Part | None:
        """The one part that shows what several pairs of runs do; None where no diagonal serves
        them all."""
        if len(seen) == 1:
            ((a, b), cut), *_ = seen.items()
            return self.alone(a, b, cut)
        queries, keys = (sorted({pair[side] for pair in seen}) for side in (0, 1))
        if not (_follow(queries) and _follow(keys)):
            return None
        query, key = _around(queries).begin, _around(keys).begin
        for delta, sides in self._diagonals(seen, query, key):
            shown = (
                _cut(a.size, b.size, delta + a.begin - query - b.begin + key, sides)
                for a, b in product(queries, keys)
            )
            wanted = (seen.get(pair) for pair in product(queries, keys))
            pairs = zip(shown, wanted, strict=True)
            if all((x and x.shape) == (y and y.shape) for x, y in pairs):
                whole = _cut(len(_around(queries)), len(_around(keys)), delta, sides)
                assert whole is not None  # it shows what each pair does
                return self._part(query, key, whole)
        return None

    def _diagonals(self, seen: _Seen, query: int, key: int) -> Iterator[tuple[int, Band]]:
        """Diagonals that may serve all pairs, counted from a query and a key that ranks hold, with
        the sides about them."""
        cuts = {
            pair: cut for pair, cut in seen.items() if cut.left is not None or cut.right is not None
        }
        if not cuts:
            yield 0, Band(None, None)
        for (a, b), cut in cuts.items():
            delta = cut.delta - cut.queries.begin + cut.keys.begin
            yield delta - (a.begin - query) + (b.begin - key), self.band


@lru_cache(1 << 12)
def _runs(order: Order, rank: int, room: int, length: int) -> tuple[_Run, ...]:
    """The runs of positions in use that a rank holds."""
    found, begin = [], 0
    for run in order.runs(rank, room):
        size = min(run.stop, length) - run.start
        if size > 0:
            found.append(_Run(begin, run.start, size))
        begin += len(run)
    return tuple(found)


def _around(runs: Sequence[_Run]) -> Span:
    """The positions from the first run to the last."""
    return Span(min(run.begin for run in runs), max(run.begin + run.size for run in runs))


def _follow(runs: Sequence[_Run]) -> bool:
    """Whether a rank holds them one behind the other."""
    return all(
        one.begin + one.size == other.begin for one, other in zip(runs, runs[1:], strict=False)
    )
