"""Device memory that lives as long as the process: tile counters, four zeroed bytes for each stream
that launches, and a place for what nobody reads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .load import checked, driver

SLAB_COUNTERS = 1024
COUNTER_BYTES = 4
UNREAD_BYTES = 1 << 20
LEGACY_DEFAULT = 0

_lock = threading.Lock()
_addresses: dict[tuple[int, int], int] = {}
_free: dict[int, list[int]] = {}
_unread: dict[int, int] = {}


def address(device: int, stream: int, lasts: Callable[[int, int], bool]) -> int:
    """Address of the counter that launches on the stream of this handle share, one after another.

    A handle alone may name several streams: the per-thread default one is another in every thread,
    and a destroyed stream leaves its handle to one made later, while its launches may still run.
    The driver's id of a stream is never used twice. lasts: whether the stream of a device and a
    handle lives as long as the process, which spares asking the driver at each launch. The thread
    has a context.

    Allocated by the driver, not by torch, whose pools may take memory back that was handed out
    while a graph was being prepared. Kept for the life of the process.
    """
    found = _addresses.get((device, stream))
    if found is not None:  # of a stream that lasts
        return found
    if stream == LEGACY_DEFAULT or lasts(device, stream):
        return _of(device, stream)
    identity = checked("identity of a stream", driver().cuStreamGetId(stream))
    return _of(device, -1 - int(identity))  # negative: no handle is


def unread(device: int) -> int:
    """Address of UNREAD_BYTES of the device, where kernels may write what nobody reads, several at
    once. Kept for the life of the process, since graphs may write there."""
    with _lock:
        if device not in _unread:
            memory = driver().cuMemAlloc(UNREAD_BYTES)
            _unread[device] = int(checked("memory for unread outputs", memory))
        return _unread[device]


def _of(device: int, identity: int) -> int:
    """The counter of a stream, given a number that names no other one."""
    with _lock:
        if (device, identity) not in _addresses:
            _addresses[device, identity] = _take(device)
        return _addresses[device, identity]


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
