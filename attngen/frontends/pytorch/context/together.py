"""Keys of many packed sequences over a group: a message has those of all.

Both kinds of messages here are those of messages.py but for where tokens lie: of all
sequences one behind the other, as calls of packed tokens read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....call.context.packed import Sent, Together
from .launches import index_of
from .messages import Around, Finish, Gathered, Pair, Parcel, Visit


@dataclass(frozen=True, eq=False, kw_only=True)
class AroundTogether(Around):
    """Keys that come from one rank at each step, of all sequences at once.

    together: the rank's launches of each step; sent: what each rank reads of another's keys at each
    step, by the reader's number.
    """

    together: Together
    sent: tuple[tuple[Sent, ...], ...]

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]:
        """Each step's keys, the rank's own first; the next step's are asked for before one is
        given out."""
        pending = self._fetch(1, k, v)
        for number in range(len(self.plans)):
            if number:
                pair = pending()
                pending = self._fetch(number + 1, k, v)
            else:
                pair = k, v
            yield self._visit(number, pair)

    def returns(self, number: int, made: Sequence[Pair], dtype: torch.dtype) -> Finish:
        """Send gradients of a step's keys to the rank that holds them, and begin to receive those
        of this rank's; the result adds these to dK and dV."""
        (pair,) = made
        if number == 0:
            return lambda sums: add_tokens(sums, pair, None)
        reader, source = self.around(number)
        own, theirs = self.sent[self.rank][number], self.sent[reader][number]
        parcels: list[Parcel] = [(x.to(dtype), source) for x in pair if own.tokens]
        rooms = self._rooms(theirs, pair, dtype)
        requests = self.swap(parcels, [(x, reader) for x in rooms or ()])

        def finish(sums: Pair) -> None:
            for request in requests:
                request.wait()
            if rooms is not None:
                add_tokens(sums, rooms, theirs)
            del parcels[:]

        return finish

    def _visit(self, number: int, pair: Pair) -> Visit:
        """A step's keys, and the launches that read them."""
        backward = self.together.backward
        return Visit((), [], [pair], None, self.together.forward[number], backward[number])

    def _fetch(self, number: int, k: Tensor, v: Tensor) -> Callable[[], Pair]:  # type: ignore[override]
        """Begin to bring what a step needs; the result waits for it."""
        if number >= len(self.plans):
            return lambda: (k, v)
        reader, source = self.around(number)
        own, wanted = self.sent[self.rank][number], self.sent[reader][number]
        parcels: list[Parcel] = []
        if wanted.tokens:
            parcels += [(x, reader) for x in cut_tokens((k, v), wanted)]
        rooms = self._rooms(own, (k, v), k.dtype)
        requests = self.swap(parcels, [(x, source) for x in rooms or ()])

        def finish() -> Pair:
            for request in requests:
                request.wait()
            del parcels[:]
            return (k[:, :0], v[:, :0]) if rooms is None else rooms

        return finish

    @staticmethod
    def _rooms(sent: Sent, like: Pair, dtype: torch.dtype) -> Pair | None:
        """Memory for tokens of keys and values, None where there are none."""
        if not sent.tokens:
            return None
        k, v = (x.new_empty(1, sent.tokens, *x.shape[2:], dtype=dtype) for x in like)
        return k, v


@dataclass(frozen=True, eq=False, kw_only=True)
class GatheredTogether(Gathered):
    """Keys of all ranks at once, in the order of their sequences, one behind the other.

    together: the rank's launches.
    """

    together: Together

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]:
        """All keys, in one step."""
        (forward,), (backward,) = self.together.forward, self.together.backward
        yield Visit((), [], [(self._whole(k), self._whole(v))], None, forward, backward)


def cut_tokens(pair: Pair, sent: Sent) -> Pair:
    """The tokens of keys and values that are sent, contiguous."""
    if sent.whole:
        k, v = (x.contiguous() for x in pair)
    else:
        k, v = (x.index_select(1, index_of(sent.runs, x.device)) for x in pair)
    return k, v


def add_tokens(sums: Pair, made: Pair, sent: Sent | None) -> None:
    """Add gradients of these tokens of keys to dK and dV; None for all."""
    for total, x in zip(sums, made, strict=True):
        if sent is None or sent.whole:
            total.add_(x)
        elif len(sent.runs) == 1:
            ((begin, end),) = sent.runs
            total[:, begin:end].add_(x)
        else:
            total.index_add_(1, index_of(sent.runs, x.device), x.to(total.dtype))
