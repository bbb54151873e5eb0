"""Streams without a GPU that hold work to the rules of capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from attngen.frontends.pytorch.context import streams


class CaptureError(RuntimeError):
    """An error with which a GPU would end capture."""


class Stream:
    """A stream: how much it has been given, and how much of each other it has waited for."""

    def __init__(self, name: str) -> None:
        self.name, self.given = name, 0
        self.seen: dict[Stream, int] = {}
        self.is_captured = False

    def work(self) -> None:
        """Give it something to do."""
        self.given += 1

    def wait_stream(self, other: Stream) -> None:
        """Wait for an event that the other records.

        Raises: CaptureError where that is not captured, and this one is.
        """
        if self.is_captured and not other.is_captured:
            raise CaptureError(f"{self.name} waits for {other.name}, which is not captured")
        self.is_captured = self.is_captured or other.is_captured
        known = {**other.seen, other: other.given}
        self.seen |= {x: max(n, self.seen.get(x, 0)) for x, n in known.items()}


class Device:
    """Streams of a device that there is not: the current one, and those beside by their purpose."""

    def __init__(self) -> None:
        self.beside: dict[str, Stream] = {}
        self.current = Stream("first")

    def stream_of(self, _: object, purpose: str) -> Stream:
        """The stream of a purpose."""
        return self.beside.setdefault(purpose, Stream(purpose))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Have tensors of a CPU on this device, as far as streams are concerned."""
        kept = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None)
        found = mock.patch.object(torch.cuda, "current_stream", lambda _: self.current)
        entered = mock.patch.object(torch.cuda, "stream", self.on)
        with kept, found, entered, mock.patch.object(streams, "stream_of", self.stream_of):
            yield

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture what is done on the current stream, and on those that wait for it.

        Raises: CaptureError where it ends before others that have begun are waited for, also on the
        way of another error, instead of it, as a GPU does.
        """
        origin = self.current
        origin.is_captured = True
        try:
            yield
        finally:
            captured = origin, *self.beside.values()
            left = [
                x.name
                for x in captured
                if x is not origin and x.is_captured and origin.seen.get(x, -1) < x.given
            ]
            for x in captured:
                x.is_captured = False
            if left:
                raise CaptureError(f"capture ends before {', '.join(left)}")
