"""Locks of the cache: one file a kernel, held while it is checked, compiled and published."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from ..io import file_lock
from ..io.file_lock import FileLock
from ..io.files import make_directory

log = logging.getLogger("attngen")

POLL_SECONDS = 0.05
WARNING_SECONDS = 10.0  # longer than nearly every kernel compiles
TIMEOUT_SECONDS = 900.0  # a holder that hangs must not hang the others for ever


@contextlib.contextmanager
def hold(path: Path, label: str) -> Iterator[None]:
    """Holds the lock file at `path`, against other processes and other threads alike.

    Where it cannot be had (no right to write, a file system without locks, a holder that hangs)
    the body runs without it: a kernel is then compiled twice at worst. label: for the log.
    """
    lock = _acquire(path, label)
    with contextlib.nullcontext() if lock is None else lock:
        yield


def sweep(directory: Path) -> None:
    """Removes the lock files that nobody holds."""
    with contextlib.suppress(OSError):
        file_lock.sweep(directory.iterdir())


def _acquire(path: Path, label: str) -> FileLock | None:
    """The lock, or None where it cannot be had."""
    start, told = time.monotonic(), 0
    try:
        make_directory(path.parent)
        if path.is_symlink():
            path.unlink()  # attngen makes none: whoever did meant another file to be made
        while (lock := file_lock.try_lock(path)) is None:
            waited = time.monotonic() - start
            if waited > TIMEOUT_SECONDS:
                log.warning("%s: still locked by another, going on without: %s", label, path)
                return None
            if told == 0:
                log.info("%s: waiting for another process or thread that builds it", label)
                told = 1
            if told == 1 and waited > WARNING_SECONDS:
                log.warning("%s: waiting for %.0f s for another process or thread that builds it; "
                            "it is built beside that one after %.0f s: %s",
                            label, waited, TIMEOUT_SECONDS, path)  # fmt: skip
                told = 2
            time.sleep(POLL_SECONDS)
    except OSError as error:
        log.info("%s: no lock, going on without: %s", label, error)
        return None
    return lock
