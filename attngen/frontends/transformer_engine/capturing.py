"""Capture of work into CUDA graphs, alone in that no cycle is collected meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch


class Captured(NamedTuple):
    """Results of captured work, which stay where they are, and how it is done again."""

    results: Any
    replay: Callable[[], None]


_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended. Allocators of torch go on to ask them, so they stay."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect cyclic garbage, and none meanwhile: an older graph in it, destroyed while another is
    captured, would invalidate that capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(work: Callable[[], Any], pool: Any, generators: Iterable[torch.Generator]) -> Captured:
    """Capture work into a CUDA graph. generators: those that it draws from, beside the current.

    Raises: what the work raises, or torch where the capture cannot be ended; then generators draw
    outside of graphs again, and the stream is the one before.
    """
    graph, drawn_from = torch.cuda.CUDAGraph(), [*generators]
    for generator in drawn_from:
        graph.register_generator_state(generator)
    with torch.cuda.stream(torch.cuda.current_stream()):  # which an error would leave another
        failure: BaseException | None = None
        try:
            with torch.cuda.graph(graph, pool=pool):
                try:
                    results = work()
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as last:
            if last is not failure:  # the capture did not end
                _UNENDED.append(graph)
                _release(pool, drawn_from)
            raise (last if failure is None else failure) from None
    return Captured(results, graph.replay)


def _release(pool: Any, generators: Sequence[torch.Generator]) -> None:
    """Free what torch leaves with a capture that it could not end: allocations go to the pool, and
    states of generators count as being captured until a capture of them ends. What fails here is
    left, for the error that came before to be raised."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            torch.zeros(1, device=torch.device("cuda", device))  # torch warns of an empty graph
