"""Locks of the cache: one file a kernel, held while it is checked, compiled and published."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("attngen")

POLL_SECONDS = 0.05
TIMEOUT_SECONDS = 900.0  # a holder that hangs must not hang the others for ever


@contextlib.contextmanager
def hold(path: Path, label: str) -> Iterator[None]:
    """Holds the lock file at `path`, against other processes and other threads alike.

    Where it cannot be had (no right to write, a file system without locks, a holder that hangs)
    the body runs without it: a kernel is then compiled twice at worst. label: for the log.
    """
    descriptor = _acquire(path, label)
    try:
        yield
    finally:
        if descriptor is not None:
            _release(descriptor)


def sweep(directory: Path) -> None:
    """Removes the lock files that nobody holds."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if (descriptor := _try(path)) is not None:
                # Whoever has opened it meanwhile finds, once it has the lock, that it is gone.
                path.unlink()
                _release(descriptor)


def _acquire(path: Path, label: str) -> int | None:
    """A descriptor that holds the lock, or None where it cannot be had."""
    start, told = time.monotonic(), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while (descriptor := _try(path)) is None:
            if time.monotonic() - start > TIMEOUT_SECONDS:
                log.warning("%s: still locked by another, going on without: %s", label, path)
                return None
            if not told:
                log.info("%s: waiting for another process or thread that builds it", label)
                told = True
            time.sleep(POLL_SECONDS)
    except OSError as error:
        log.info("%s: no lock, going on without: %s", label, error)
        return None
    return descriptor


def _try(path: Path) -> int | None:
    """A descriptor that holds the lock, or None where another holds it. Raises: OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # held, or swept between open and lock
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _release(descriptor: int) -> None:
    # Unlocked, not only closed: a child forked meanwhile shares the lock with its descriptor.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
