"""Calls as CUDA graphs, which the host takes no time for."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch

from attngen.bench.timing import following_milliseconds

STEADY_MS = 50.0  # of calls before those that are timed, and of these


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a replay of a graph of it, which keeps the tensors that it reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_: Callable[[], Any] = call) -> None:
        graph.replay()

    return replay


def milliseconds(call: Callable[[], Any]) -> float:
    """The mean time of a call behind and among as many as take `STEADY_MS`, since clocks follow the
    power that is drawn."""
    following_milliseconds(call, 1)
    count = ceil(STEADY_MS / following_milliseconds(call, 1))
    for _ in range(count):
        call()
    return following_milliseconds(call, count)
