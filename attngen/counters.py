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
_lasting = {LEGACY_DEFAULT}
_addresses: dict[tuple[int, int], int] = {}
_free: dict[int, list[int]] = {}
_unread: dict[int, int] = {}


def address(device: int, stream: int) -> int:
    """Address of the counter that launches on this stream of this device share, one after another.
    stream: a number that names no other stream while the process lives.

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


def of_stream(device: int, stream: int, lasts: Callable[[], bool]) -> int:
    """Address of the counter of the stream that this handle names now.

    A handle alone may name several: the per-thread default stream is another in every thread, and
    a destroyed stream leaves its handle to one made later, while its launches may still run. The
    driver's id of a stream is never used twice. lasts: whether the stream lives as long as the
    process, which spares asking the driver at each launch. The thread has a context.
    """
    if stream not in _lasting:
        if not lasts():
            identity = checked("identity of a stream", driver().cuStreamGetId(stream))
            return address(device, -1 - int(identity))  # negative: no handle is
        _lasting.add(stream)
    return address(device, stream)


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
