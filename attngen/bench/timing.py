"""Timing: interleaved rounds, so that a chip's drift in clocks and power meets all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

MAX_REPEATS = 1000
HOST_WARM_UP = 20  # calls that are not counted
CEILING = "cuBLAS bf16 8192x8192x8192"
CEILING_FLOPS = 2 * 8192**3

Call = Callable[[], object]
Stopwatch = Callable[[Call, int], float]  # a call and how often → milliseconds a call


def cuda_milliseconds(call: Call, repeats: int) -> float:
    """Mean time of a call on the GPU, between two events; one call before them is not counted."""
    call()
    return following_milliseconds(call, repeats)


def following_milliseconds(call: Call, repeats: int) -> float:
    """Mean time of a call on the GPU, between two events, behind what it has to do."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def ceiling_call() -> Call:
    """A product of two square matrices, the most that the tensor cores reach in practice."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def time_interleaved(
    calls: Mapping[str, Call],
    rounds: int,
    budget_ms: float,
    stopwatch: Stopwatch = cuda_milliseconds,
    settle_ms: float = 0,
) -> dict[str, float]:
    """Median milliseconds of each call over the rounds.

    Each round measures every call once, in a shuffled order, for about `budget_ms`; a median of
    rounds outlives the one in which a neighbour had warmed or throttled the chip. Before that the
    call runs for `settle_ms`, not counted: a chip at its power limit takes up to 100 ms to the
    clocks that a call's own power allows, and has its neighbours' until then.
    """
    once = {name: max(1e-3, stopwatch(call, 2)) for name, call in calls.items()}

    def repeats(name: str, ms: float) -> int:
        return max(2, min(MAX_REPEATS, int(ms / once[name])))

    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            if settle_ms:
                stopwatch(calls[name], repeats(name, settle_ms))
            samples[name].append(stopwatch(calls[name], repeats(name, budget_ms)))
    return {name: statistics.median(values) for name, values in samples.items()}


def host_interleaved(calls: Mapping[str, Call], rounds: int, repeats: int) -> dict[str, float]:
    """Median microseconds that each call keeps the host, the GPU idle at the first of so many."""
    for call in calls.values():
        for _ in range(HOST_WARM_UP):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                calls[name]()
            samples[name].append(1e6 * (time.perf_counter() - start) / repeats)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}
