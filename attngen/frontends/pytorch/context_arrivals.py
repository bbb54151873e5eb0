"""Keys of several steps side by side, as rounds of a forward read them.

Tokens of all sequences of a batch lie next to each other, so that what comes from several ranks is
one tensor wherever its parts end. Keys are asked for two rounds ahead, on a stream that waits for
what was computed by then: kernels of attention fill a GPU's multiprocessors until they end, and
what NCCL copies with is to be ready before the kernel that it is to run beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...call.context_rounds import OWN, Round, Rounds
from ...call.context_steps import Span
from .context_messages import Around, Gathered, Pair, Visit

AHEAD = 2  # rounds


def forward_visits(messages: Around | Gathered, k: Tensor, v: Tensor) -> Iterator[Visit]:
    """Keys as parts of a forward read them."""
    if isinstance(messages, Around) and messages.rounds is not None:
        return _Arriving(messages, messages.rounds, k, v).visits()
    return messages.visits(k, v)


class _Arriving:
    """Rounds of a rank, whose own keys are k and v."""

    def __init__(self, around: Around, rounds: Rounds, k: Tensor, v: Tensor) -> None:
        self._around, self._rounds, self._k, self._v = around, rounds, k, v
        self._beside = _stream_beside(k)
        self._memory: dict[int, Pair] = {}
        self._requests: dict[int, list[Any]] = {}
        self._own: Pair | None = None  # as they are sent

    def visits(self) -> Iterator[Visit]:
        """Each round's keys, the rank's own first."""
        rounds = self._rounds.rounds
        for number in range(1, AHEAD):
            self._ask(number)
        for number, each in enumerate(rounds):
            self._ask(number + AHEAD)
            for request in self._requests.pop(number, ()):
                request.wait()
            if each.parts:
                yield self._visit(each)
            needed = {x.region for x in rounds[number + 1 :]}
            self._memory = {n: x for n, x in self._memory.items() if n in needed}
        if self._beside is not None:  # as a capture of a graph wants it
            torch.cuda.current_stream(self._k.device).wait_stream(self._beside)

    def _visit(self, each: Round) -> Visit:
        """The keys that a round's parts read."""
        if each.region is None:
            return Visit(each.parts, [Span(0, self._k.shape[1])], [(self._k, self._v)])
        k, v = self._memory[each.region]
        return Visit(each.parts, [Span(0, len(k))], [(k.transpose(0, 1), v.transpose(0, 1))])

    def _ask(self, number: int) -> None:
        """Ask for the keys of a round, if there is one."""
        if number >= len(self._rounds.rounds):
            return
        each = self._rounds.rounds[number]
        assert each.region is not None  # all but the first have one
        places = self._rounds.regions[each.region].places
        fresh = each.region not in self._memory
        region = self._region(each.region)
        with self._on_stream_beside():
            if self._own is None:
                k, v = (x.transpose(0, 1).contiguous() for x in (self._k, self._v))
                self._own = k, v
            if fresh and OWN in places:
                for x, own in zip(region, self._own, strict=True):
                    x[slice(*places[OWN])].copy_(own[: len(places[OWN])])
            rooms = {n: _cut(region, places[n]) for n in each.steps if n in places}
            self._requests[number] = self._around.ask(each.steps, self._own, rooms)

    def _on_stream_beside(self) -> AbstractContextManager[Any]:
        """The stream for messages, behind what was computed by now; the current one on a CPU."""
        if self._beside is None:
            return nullcontext()
        self._beside.wait_stream(torch.cuda.current_stream(self._k.device))
        return torch.cuda.stream(self._beside)

    def _region(self, number: int) -> Pair:
        """Memory of a region's keys and values, [t, b, h, d]."""
        if number not in self._memory:
            tokens = self._rounds.regions[number].tokens
            self._memory[number] = self._around.room(number, self._k, self._v, tokens)
        return self._memory[number]


def _cut(region: Pair, place: Span) -> Pair:
    """A step's keys and values of a region's."""
    k, v = region
    return k[slice(*place)], v[slice(*place)]


def _stream_beside(x: Tensor) -> torch.cuda.Stream | None:
    """A stream of the tensor's device for messages, the same for all calls; None on a CPU."""
    if not x.is_cuda:
        return None
    place = x.get_device()
    if place not in _streams:
        _streams[place] = torch.cuda.Stream(x.device)
    return _streams[place]


_streams: dict[int, torch.cuda.Stream] = {}
