"""Captures beside Python's collector, and after errors, over a stand-in for torch's graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attngen import te
from attngen.frontends.transformer_engine import capturing


class Graph:
    """A graph that knows its generators."""

    def __init__(self) -> None:
        self.generators: list[Any] = []
        self.register_generator_state = self.generators.append

    def replay(self) -> None: ...


class Device:
    """Stands in for torch's captures, which may fail to end.

    collecting: whether cycles were collected in each; captured: generators that count as captured;
    freed: what was called to give memory back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends, self.captured = True, set[str]()
        self.collecting, self.freed = list[bool](), list[Any]()
        self.graphs, self.unended = list[weakref.ref[Graph]](), list[Graph]()
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, found in (
            ("Stream", lambda: stream), ("current_stream", lambda: stream),
            ("stream", lambda stream: nullcontext()), ("graph_pool_handle", lambda: (0, 7)),
            ("current_device", lambda: 3), ("CUDAGraph", self.graph), ("graph", self.capture),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, found)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            called = partial(lambda name, *given: self.freed.append((name, *given)), name)
            monkeypatch.setattr(torch._C, name, called, raising=False)
        monkeypatch.setattr(capturing, "_UNENDED", self.unended)

    def graph(self) -> Graph:
        made = Graph()
        self.graphs.append(weakref.ref(made))
        return made

    @contextmanager
    def capture(self, graph: Graph, pool: Any = None) -> Iterator[None]:
        self.collecting.append(gc.isenabled())
        self.captured.update(graph.generators)
        try:
            yield
        finally:
            if not self.ends:
                raise RuntimeError("of an error before")
            self.captured.difference_update(graph.generators)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_cycle_is_collected_while_callables_are_captured(device: Device, enabled: bool) -> None:
    assert gc.isenabled()
    garbage: list[Any] = [nn.Linear(1, 1)]
    gone, layer = weakref.ref(garbage[0]), nn.Linear(4, 4)
    garbage.append(garbage)
    del garbage
    try:
        (gc.enable if enabled else gc.disable)()
        te.make_graphed_callables(layer, (torch.ones(2, 4),))
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError):
            te.make_graphed_callables(lambda: 1 / 0, (), num_warmup_iters=0)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert gone() is None and device.collecting == [False] * 3


def test_graphs_go_with_the_module(device: Device) -> None:
    """Reference counts free them: they are in no cycle, which the collector would have to find."""
    layer, sample = nn.Linear(4, 4), (torch.ones(2, 4, requires_grad=True),)
    te.make_graphed_callables(layer, sample)
    te.make_graphed_callables(layer.eval(), sample)  # over its forward of before
    forward = layer.forward
    assert [each() is not None for each in device.graphs] == [True] * 3
    gc.collect()
    gc.disable()
    try:
        del layer
        forward(*sample)  # replays, which need no module
        assert device.graphs[0]() is not None
        del forward
        assert [each() for each in device.graphs] == [None] * 3
    finally:
        gc.enable()


def test_what_the_work_raises_is_raised(device: Device) -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        capturing.capture(fails, (0, 7), ["state"])  # type: ignore[list-item]
    assert not (device.captured or device.unended or device.freed)


@pytest.mark.parametrize("raises", [True, False])
def test_a_capture_that_does_not_end_leaves_states_as_they_were(
    monkeypatch: pytest.MonkeyPatch, device: Device, raises: bool
) -> None:
    """Whether the work raises or torch does where the capture should end."""
    device.ends = False

    def zeros(*shape: int, device: torch.device) -> None:
        assert device == torch.device("cuda", 3)

    def work() -> None:
        if raises:
            raise KeyError("x")

    def released(device_index: int, pool: Any) -> None:
        device.ends = True  # what is captured from now on

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", released)
    with pytest.raises(KeyError if raises else RuntimeError):
        capturing.capture(work, (0, 7), ["state"])  # type: ignore[list-item]
    assert not device.captured and device.freed == [("_cuda_endAllocateToPool", 3, (0, 7))]
    assert [each.generators for each in device.unended] == [["state"]]
