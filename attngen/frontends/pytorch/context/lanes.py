"""Streams of a forward's rounds: parts that share no rows run beside each other.

Kernels of attention hold a GPU's multiprocessors until their last tile ends. A part on another
stream begins on those that the one beside it leaves, so that a round has one end instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ....call.context.steps import Span
from .messages import Pair

_streams: dict[int, torch.cuda.Stream] = {}


class Lanes:
    """The current stream for queries that go on with each round, which begin at `cut`, and another
    one for the last of those that wait, which end there. Others that wait are on the current one,
    too, behind whatever goes on: they see fewer keys, and fill what tiles of many leave. When a
    `with` of it ends, the current stream waits for both, whatever was raised: outputs are its
    memory."""

    def __init__(self, q: Tensor, cut: int, several: bool) -> None:
        self._cut = cut
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if several and q.is_cuda:
            self._streams = torch.cuda.current_stream(q.device), _stream_of(q)

    def begin(self) -> None:
        """Let both go on with a round whose keys the current stream has waited for."""
        if self._streams is not None:
            here, beside = self._streams
            beside.wait_stream(here)

    @contextmanager
    def of(self, queries: Span, keys: Pair) -> Iterator[None]:
        """The stream for a part of these queries, which reads these keys."""
        if self._streams is None or queries.end != self._cut:
            yield
            return
        _, beside = self._streams
        with torch.cuda.stream(beside):
            yield
        for x in keys:  # whose memory may go to others before all rounds have ended
            x.record_stream(beside)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._streams is not None:
            here, beside = self._streams
            here.wait_stream(beside)


def _stream_of(x: Tensor) -> torch.cuda.Stream:
    """A stream of the tensor's device, the same one for all calls."""
    place = x.get_device()
    if place not in _streams:
        _streams[place] = torch.cuda.Stream(x.device)
    return _streams[place]
