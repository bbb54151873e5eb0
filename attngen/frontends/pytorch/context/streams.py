"""Streams beside the current one, as capture of a graph wants them.

A graph has what streams do once they have waited for a captured one, and capture ends where all of
them are waited for. To wait for one that has not begun breaks it, and so does leaving one that has,
also on the way of an error, which nobody would learn of then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_streams: dict[tuple[int, str], torch.cuda.Stream] = {}


class Beside:
    """A stream of a tensor's device for a purpose, the same one for all calls; on a CPU none, and
    all is done where it is called."""

    def __init__(self, x: Tensor, purpose: str) -> None:
        self._device = x.device
        self._stream = stream_of(x, purpose)
        self._has_begun = False  # and is not waited for yet

    def begin(self) -> None:
        """Let it go on behind what the current stream has been given by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._has_begun = True

    def end(self) -> None:
        """Have the current stream wait for whatever it has begun."""
        if self._stream is not None and self._has_begun:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._has_begun = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current stream. It must have begun."""
        if self._stream is None:
            yield
            return
        assert self._has_begun
        with torch.cuda.stream(self._stream):
            yield

    def keeps(self, x: Tensor) -> None:
        """Keep memory that it reads from others until it has."""
        if self._stream is not None:
            x.record_stream(self._stream)


def stream_of(x: Tensor, purpose: str) -> torch.cuda.Stream | None:
    """The stream, None on a CPU."""
    if not x.is_cuda:
        return None
    key = x.get_device(), purpose
    if key not in _streams:
        _streams[key] = torch.cuda.Stream(x.device)
    return _streams[key]
