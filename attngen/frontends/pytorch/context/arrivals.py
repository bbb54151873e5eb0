"""Keys of several steps side by side, as rounds of a forward read them.

Tokens of all sequences of a batch lie next to each other, so that what comes from several ranks is
one tensor wherever its parts end. Keys are asked for two rounds ahead, on a stream that waits for
what was computed by then: kernels of attention fill a GPU's multiprocessors until they end, and
what NCCL copies with is to be ready before the kernel that it is to run beside.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from torch import Tensor

from ....call.context.rounds import OWN, Round, Rounds
from ....call.context.steps import Part, Span
from .messages import Around, Gathered, Pair, Visit
from .streams import Beside

AHEAD = 2  # rounds


def forward_rounds(
    messages: Around | Gathered, k: Tensor, v: Tensor
) -> Generator[list[Visit], None, None]:
    """Keys as parts of a forward read them, of a round or of a step; to be closed."""
    if not isinstance(messages, Around) or messages.rounds is None:
        yield from ([visit] for visit in messages.visits(k, v))
        return
    with closing(Arriving(messages, messages.rounds, k, v).rounds()) as rounds:
        for _, visits in rounds:
            yield visits


class Arriving:
    """Rounds of a rank, whose own keys are k and v, and how the keys of others come."""

    def __init__(self, around: Around, rounds: Rounds, k: Tensor, v: Tensor) -> None:
        self._around, self._rounds, self._k, self._v = around, rounds, k, v
        self._beside = Beside(k, "messages")
        self._memory: dict[int, Pair] = {}
        self._requests: dict[int, list[Any]] = {}
        self._own: Pair | None = None  # as they are sent

    def rounds(self) -> Generator[tuple[Round, list[Visit]], None, None]:
        """Each round, and the keys of each of its parts. Once it is closed the current stream waits
        for all that is asked for."""
        try:
            yield from self._all_rounds()
        finally:  # as capture of a graph wants it
            self._beside.end()

    def _all_rounds(self) -> Iterator[tuple[Round, list[Visit]]]:
        rounds = self._rounds.rounds
        for number in range(1, AHEAD):
            self._ask(number)
        for number, each in enumerate(rounds):
            self._ask(number + AHEAD)
            for request in self._requests.pop(number, ()):
                request.wait()
            if each.region is not None:
                self._beside.end()  # with copies, which no message may have waited for
            yield each, [self._visit(each, part) for part in each.parts]
            needed = {x.region for x in rounds[number + 1 :]}
            self._memory = {n: x for n, x in self._memory.items() if n in needed}

    def _visit(self, each: Round, part: Part) -> Visit:
        """The keys that a part of a round reads."""
        k, v = self._k, self._v
        if each.region is not None:
            k, v = (x.transpose(0, 1) for x in self._memory[each.region])
        begin, end = part.keys
        return Visit((part,), [part.keys], [(k[:, begin:end], v[:, begin:end])])

    def _ask(self, number: int) -> None:
        """Ask for the keys of a round, if there is one."""
        if number >= len(self._rounds.rounds):
            return
        each = self._rounds.rounds[number]
        if each.region is None:  # of the rank's own keys
            return
        places = self._rounds.regions[each.region].places
        fresh = each.region not in self._memory
        region = self._region(each.region)
        self._beside.begin()  # behind what was computed by now
        with self._beside.current():
            if self._own is None:
                k, v = (x.transpose(0, 1).contiguous() for x in (self._k, self._v))
                self._own = k, v
            if fresh and OWN in places:
                for x, own in zip(region, self._own, strict=True):
                    x[slice(*places[OWN])].copy_(own[: len(places[OWN])])
            rooms = {n: cut_pair(region, places[n]) for n in each.steps if n in places}
            self._requests[number] = self._around.ask(each.steps, self._own, rooms)

    def _region(self, number: int) -> Pair:
        """Memory of a region's keys and values, [t, b, h, d]."""
        if number not in self._memory:
            region = self._rounds.regions[number]
            self._memory[number] = self._around.room(region, self._k, self._v)
        return self._memory[number]


def cut_pair(pair: Pair, place: Span) -> Pair:
    """Some keys and values of [t, b, h, d]."""
    k, v = pair
    return k[slice(*place)], v[slice(*place)]
