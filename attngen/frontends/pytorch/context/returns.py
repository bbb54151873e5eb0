"""Gradients of keys on their way to where these are held, and their sums there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ....call.context.rounds import Rounds
from ....call.context.steps import Span
from .arrivals import AHEAD, Arriving, cut_pair
from .messages import Around, Pair, Visit

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
Made = Callable[[Visit], Pair]  # gradients of a visit's keys


class KeySums:
    """Sums of a rank's dK and dV, [b, t, h, d] like k and v. What comes first to a place is written
    there, and the rest is added: the last to come when the sums are rounded, in one pass."""

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._sums = k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)
        self._there: list[Span] = []
        self._held: list[tuple[Span, Pair]] = []  # are not added yet; no two meet

    def place(self, span: Span) -> Pair | None:
        """Where gradients of these keys are to be written, None where some are there."""
        if any(there for _, there in self._pieces(span)):
            return None
        return _cut(self._sums, span)

    def take(self, span: Span, pair: Pair, place: Pair | None) -> None:
        """Add gradients of these keys, which are there already if they are the `place`."""
        if pair is place:
            self._there.append(span)
        else:
            self.add(span, pair)

    def add(self, span: Span, pair: Pair) -> None:
        """Add gradients of these keys, which nobody writes to any more."""
        meet = [each for each in self._held if _meets(span, each)]
        self._held = [each for each in self._held if not _meets(span, each)]
        for each in meet:
            self._add(*each)
        if all(there for _, there in self._pieces(span)):
            self._held.append((span, pair))
        else:
            self._add(span, pair)

    def end(self, dtype: torch.dtype) -> Pair:
        """All sums, rounded, 0 of keys that nobody has seen."""
        k, v = self._sums
        whole = Span(0, k.shape[1])
        if dtype == k.dtype:
            for each in self._held:
                self._add(*each)
            self._write(self._sums, whole, [])
            return self._sums
        rounded = torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
        for span, pair in self._held:
            own = _cut(rounded, span), _cut(self._sums, span), pair
            for to, total, x in zip(*own, strict=True):
                torch.add(total, x, out=to)
        self._write(rounded, whole, [span for span, _ in self._held])
        return rounded

    def _write(self, into: Pair, whole: Span, written: list[Span]) -> None:
        """Write sums to all places but those that are written, 0 where there are none."""
        edges = sorted({*whole, *(edge for span in (*self._there, *written) for edge in span)})
        for span in map(Span, edges, edges[1:]):
            if any(_within(span, x) for x in written):
                continue
            there = any(_within(span, x) for x in self._there)
            for to, total in zip(_cut(into, span), _cut(self._sums, span), strict=True):
                if not there:
                    to.zero_()
                elif into is not self._sums:
                    to.copy_(total)

    def _add(self, span: Span, pair: Pair) -> None:
        for piece, there in self._pieces(span):
            own = _cut(pair, Span(piece.begin - span.begin, piece.end - span.begin))
            for total, x in zip(_cut(self._sums, piece), own, strict=True):
                total.add_(x) if there else total.copy_(x)
            if not there:
                self._there.append(piece)

    def _pieces(self, span: Span) -> list[tuple[Span, bool]]:
        """A span in pieces, and whether sums of each are there."""
        edges = {edge for x in self._there for edge in x if span.begin < edge < span.end}
        pieces = [Span(a, b) for a, b in pairwise(sorted({*span, *edges}))]
        return [(piece, any(_within(piece, x) for x in self._there)) for piece in pieces]


def _cut(pair: Pair, span: Span) -> Pair:
    dk, dv = (x[:, span.begin : span.end] for x in pair)
    return dk, dv


def _within(span: Span, other: Span) -> bool:
    return other.begin <= span.begin and span.end <= other.end


def _meets(span: Span, held: tuple[Span, Pair]) -> bool:
    other, _ = held
    return other.begin < span.end and span.begin < other.end


def sums_of_rounds(
    around: Around, rounds: Rounds, operands: Pair, made_of: Made, dtypes: Dtypes
) -> Pair:
    """The sums of dK and dV of a rank's keys.

    operands: these, k and v; made_of: makes gradients of the keys at hand; dtypes: of sums, of
    gradients in messages, which are waited for as late as two rounds behind theirs, and of the
    result.
    """
    k, v = operands
    sums_dtype, travels, result = dtypes
    sums, like = KeySums(k, v, sums_dtype), (k.transpose(0, 1), v.transpose(0, 1))
    returning: deque[tuple[list[Any], list[tuple[Span, Pair]]]] = deque()

    def finish() -> None:
        requests, found = returning.popleft()
        for request in requests:
            request.wait()
        for span, (dk, dv) in found:
            sums.add(span, (dk.transpose(0, 1), dv.transpose(0, 1)))

    with closing(Arriving(around, rounds, k, v).rounds()) as arriving:
        for each, visits in arriving:
            made: dict[int, Pair] = {}
            for visit in visits:
                (span,) = visit.spans
                if each.region is None:
                    place = sums.place(span)
                    sums.take(span, made_of(replace(visit, into=place)), place)
                    continue
                pair, places = made_of(visit), rounds.regions[each.region].places
                made |= {
                    n: _sent(pair, span, places[n]) for n in each.steps if _has(span, places, n)
                }
            if each.steps:
                returning.append(around.give(each.steps, made, like, travels))
            while len(returning) > AHEAD:
                finish()
    while returning:
        finish()
    return sums.end(result)


def _has(span: Span, places: dict[int, Span], step: int) -> bool:
    """Whether a step's keys are among these."""
    return step in places and span.begin <= places[step].begin < span.end


def _sent(pair: Pair, span: Span, place: Span) -> Pair:
    """Gradients of a step's keys, [t, b, h, d], out of those of a span [b, t, h, d]."""
    own = Span(place.begin - span.begin, place.end - span.begin)
    dk, dv = (x.transpose(0, 1) for x in pair)
    dk, dv = (x.contiguous() for x in cut_pair((dk, dv), own))
    return dk, dv
