"""Tile counters: four zeroed bytes of device memory for each stream that launches."""

from __future__ import annotations

import threading

from .load import checked, driver

SLAB_COUNTERS = 1024
COUNTER_BYTES = 4

_lock = threading.Lock()
_addresses: dict[tuple[int, int], int] = {}
_free: dict[int, list[int]] = {}


def address(device: int, stream: int) -> int:
    """Address of the counter that launches on this stream of this device share, one after another.

    Allocated by the driver, not by torch, whose pools may take memory back that was handed out
    while a graph was being prepared. Kept for the life of the process.
    """
    found = _addresses.get((device, stream))
    if found is None:
        with _lock:
            if (device, stream) not in _addresses:
                _addresses[device, stream] = _take(device)
            found = _addresses[device, stream]
    return found


def _take(device: int) -> int:
    free = _free.setdefault(device, [])
    if not free:
        cuda = driver()
        size = SLAB_COUNTERS * COUNTER_BYTES
        slab = checked("memory for tile counters", cuda.cuMemAlloc(size))
        checked("zeroing tile counters", cuda.cuMemsetD32(slab, 0, SLAB_COUNTERS))
        checked("zeroing tile counters", cuda.cuCtxSynchronize())
        free.extend(int(slab) + COUNTER_BYTES * index for index in range(SLAB_COUNTERS))
    return free.pop()
