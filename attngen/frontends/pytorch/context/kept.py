"""Integers of plans on a device: kept by what they are of, for ever where a graph reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
KEPT = 32


class OnDevice(Generic[T]):
    """A function that makes tensors which nobody writes, once for the same arguments.

    make: the function, whose last argument is the device; most: results before the oldest is
    forgotten. What is found under capture stays, since a graph has its addresses.
    """

    def __init__(self, make: Callable[..., T], most: int) -> None:
        self._kept = lru_cache(most)(make)
        self._of_graphs: dict[Hashable, T] = {}

    def __call__(self, *key: Any) -> T:
        found = self._of_graphs.get(key)
        if found is None:
            found = self._kept(*key)
            *_, device = key
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._of_graphs[key] = found
        return found

    def cache_info(self) -> Any:
        """Statistics of `functools.lru_cache`, of results that no graph reads."""
        return self._kept.cache_info()


def on_device(most: int) -> Callable[[Callable[..., T]], OnDevice[T]]:
    """Keep that many results of a function."""

    def kept(make: Callable[..., T]) -> OnDevice[T]:
        return OnDevice(make, most)

    return kept


@on_device(KEPT)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Integers of a host as int32 on a device."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int32, device=device)


def numbers_on(given: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Lengths as a call on a device reads them: copied once where the host has them, so that a
    graph may capture the call."""
    if isinstance(given, Tensor) and (given.device == device or torch.compiler.is_compiling()):
        return given.to(device)
    numbers = given.tolist() if isinstance(given, Tensor) else given
    return _numbers(tuple(map(int, numbers)), device)
