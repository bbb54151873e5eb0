"""Integers of plans: what a graph reads outlives others of its kind."""

from __future__ import annotations

import weakref
from unittest import mock

import torch

from attngen.frontends.pytorch.context.kept import numbers_on, on_device


def test_what_a_graph_reads_is_never_forgotten() -> None:
    @on_device(2)
    def of(n: int, _: torch.device) -> torch.Tensor:
        return torch.full((1,), n)

    device = torch.device("cuda")
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        plain, seen = weakref.ref(of(0, device)), of(1, device)
        assert of(1, device) is seen
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        read = weakref.ref(of(1, device))
    del seen
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
        for n in range(2, 5):
            of(n, device)
        assert plain() is None
        assert read() is not None and of(1, device) is read()


def test_lengths_of_a_host_come_to_a_device_once() -> None:
    given, device = torch.tensor([0, 2, 5]), torch.device("meta")
    first = numbers_on(given, device)
    assert first.device == device and first.dtype == torch.int32
    assert numbers_on([0, 2, 5], device) is first
    assert numbers_on(given, torch.device("cpu")) is given  # are there
