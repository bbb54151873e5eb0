"""Streams of a forward's rounds: parts that share no rows run beside each other.

Kernels of attention hold a GPU's multiprocessors until their last tile ends. A part on another
stream begins on those that the one beside it leaves, so that a round has one end instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ....call.context.steps import Span
from .messages import Pair
from .streams import Beside


class Lanes:
    """The current stream for queries that go on with each round, which begin at `cut`, and another
    one for the last of those that wait, which end there. Others that wait are on the current one,
    too, behind whatever goes on: they see fewer keys, and fill what tiles of many leave. When a
    `with` of it ends, the current stream waits for both, whatever was raised: outputs are its
    memory."""

    def __init__(self, q: Tensor, cut: int, several: bool) -> None:
        self._cut = cut
        self._beside = Beside(q, "queries that wait") if several else None

    def begin(self) -> None:
        """Let both go on with a round whose keys the current stream has waited for."""
        if self._beside is not None:
            self._beside.begin()

    @contextmanager
    def of(self, queries: Span, keys: Pair) -> Iterator[None]:
        """The stream for a part of these queries, which reads these keys."""
        if self._beside is None or queries.end != self._cut:
            yield
            return
        with self._beside.current():
            yield
        for x in keys:  # whose memory may go to others before all rounds have ended
            self._beside.keeps(x)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.end()
