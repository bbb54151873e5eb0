"""Energy: joules that a GPU takes for a call, by the driver's counter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..errors import MeasureError
from .timing import Call, cuda_milliseconds

# The counter moves some ten times a second: a step of it is below 2 % of what is read.
LEAST_MS = 1000.0
SETTLE_MS = 200.0  # until the chip has the clocks that a call's power allows
NONE: Mapping[str, float] = MappingProxyType({})

Counter = Callable[[], float]  # joules since some moment, of the current device


def counter() -> Counter:
    """The energy counter of the current device. Raises: MeasureError where there is none."""
    try:
        from cuda.bindings import nvml
    except ImportError as error:
        raise MeasureError(f"energy needs cuda-bindings with NVML: {error}") from error
    uuid = f"GPU-{torch.cuda.get_device_properties('cuda').uuid}"
    device: Any
    try:
        nvml.init_v2()
        device = nvml.device_get_handle_by_uuid(uuid)
        nvml.device_get_total_energy_consumption(device)
    except Exception as error:  # of NVML's own kind, which the bindings name by version
        raise MeasureError(f"NVML has no energy counter of {uuid}: {error}") from error
    return lambda: float(nvml.device_get_total_energy_consumption(device)) / 1000


def joules(calls: Mapping[str, Call], read: Counter) -> dict[str, float]:
    """Joules of each call, of the whole chip, with what it takes at rest: one after another, each
    for a second after it has settled."""
    return {name: _joules(call, read) for name, call in calls.items()}


def _joules(call: Call, read: Counter) -> float:
    once = max(1e-3, cuda_milliseconds(call, 2))
    cuda_milliseconds(call, max(2, int(SETTLE_MS / once)))
    repeats = max(2, int(LEAST_MS / once))
    before = read()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (read() - before) / repeats
