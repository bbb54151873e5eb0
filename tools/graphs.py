"""Calls as CUDA graphs, which the host takes no time for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch

from attngen.bench.timing import following_milliseconds

STEADY_MS = 50.0  # of each call in a window


def captured(call: Callable[[], Any], pool: Any = None) -> Callable[[], Any]:
    """The call as a replay of a graph of it, which keeps the tensors that it reads. pool: memory
    (`torch.cuda.graph_pool_handle`) of several graphs, of whose replays no two are at once, and
    whose results nobody reads."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()

    def replay(_: Callable[[], Any] = call) -> None:
        graph.replay()

    return replay


def turns(calls: Sequence[Callable[[], Any]], windows: int) -> list[list[float]]:
    """Mean times of calls in each of so many windows, in milliseconds. A window has all of them in
    turn, each as often as takes `STEADY_MS`, without a pause of the GPU, whose clocks follow the
    power that is drawn; one more comes first, and is not counted."""
    counts = []
    for call in calls:
        following_milliseconds(call, 1)
        counts.append(ceil(STEADY_MS / following_milliseconds(call, 1)))
    found = []
    for _ in range(1 + windows):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(1 + len(calls))]
        first, *ends = marks
        first.record()
        for call, count, end in zip(calls, counts, ends, strict=True):
            for _ in range(count):
                call()
            end.record()
        torch.cuda.synchronize()
        spans = zip(marks, ends, counts, strict=False)
        found.append([a.elapsed_time(b) / count for a, b, count in spans])
    return found[1:]


def among(times: Sequence[Sequence[float]]) -> tuple[float, list[float], list[float]]:
    """Times of others beside those of one call that is timed before and behind each of them.

    times: of each window: of the one call, another, the one, the next other, …, the one. Returns:
    the median time of the one; of each other the median of its ratios to the mean of the two beside
    it, from which what changes evenly is gone; and by how much these ratios differ at most.
    """
    alone = statistics.median(x for window in times for x in window[::2])
    ratios = [
        [2 * x / (a + b) for a, x, b in zip(w[::2], w[1::2], w[2::2], strict=False)] for w in times
    ]
    by_call = [*zip(*ratios, strict=True)]
    spreads = [max(each) - min(each) for each in by_call]
    return alone, [*map(statistics.median, by_call)], spreads
