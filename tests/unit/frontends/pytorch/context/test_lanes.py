"""Streams of rounds: who waits for whom, and for whom memory of keys is kept."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from attngen.call.context.steps import Span
from attngen.frontends.pytorch.context import streams
from attngen.frontends.pytorch.context.lanes import Lanes


class Stream:
    """A stream that notes what happens to it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Any) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


def keys_of(notes: list[str]) -> Any:
    """Keys and values that note on which stream they are read."""
    kept = SimpleNamespace(record_stream=lambda x: notes.append(f"kept for {x.name}"))
    return kept, kept


def test_queries_that_wait_have_a_stream_of_their_own() -> None:
    notes: list[str] = []
    here, beside = Stream("here", notes), Stream("beside", notes)

    @contextmanager
    def on(stream: Any) -> Any:
        notes.append(f"on {stream.name}")
        yield

    q = SimpleNamespace(is_cuda=True, device="cuda:0", get_device=lambda: 0)
    with (
        mock.patch.object(torch.cuda, "current_stream", lambda _: here),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(streams, "stream_of", lambda *_: beside),
    ):
        lanes = Lanes(q, 6, several=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a part fails"), lanes:
            lanes.begin()
            for queries in (Span(6, 8), Span(4, 6), Span(0, 4)):
                with lanes.of(queries, keys_of(notes)):
                    notes.append(f"part of {queries.begin}")
            raise ValueError("a part fails")
    assert notes == [
        *("beside waits for here", "part of 6", "on beside", "part of 4"),
        *("kept for beside", "kept for beside", "part of 0", "here waits for beside"),
    ]


def test_one_stream_has_all_parts_where_nothing_runs_beside() -> None:
    notes: list[str] = []
    for lanes in (Lanes(torch.zeros(1), 8, several=True), Lanes(torch.zeros(1), 8, several=False)):
        with lanes:
            lanes.begin()
            with lanes.of(Span(0, 6), keys_of(notes)):
                pass
    assert not notes
