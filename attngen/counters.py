"""Device memory that lives as long as the process: tile counters, four zeroed bytes for each stream
that launches, and a place for what nobody reads."""

from __future__ import annotations

import threading

from .load import checked, driver

SLAB_COUNTERS = 1024
COUNTER_BYTES = 4
UNREAD_BYTES = 1 << 20

_lock = threading.Lock()
_addresses: dict[tuple[int, int], int] = {}
_free: dict[int, list[int]] = {}
_unread: dict[int, int] = {}


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


def unread(device: int) -> int:
    """Address of UNREAD_BYTES of the device, where kernels may write what nobody reads, several at
    once. Kept for the life of the process, since graphs may write there."""
    with _lock:
        if device not in _unread:
            memory = driver().cuMemAlloc(UNREAD_BYTES)
            _unread[device] = int(checked("memory for unread outputs", memory))
        return _unread[device]


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
