"""Locks on files: held by this process alone, free as soon as it ends, however it ends.

A lock is a POSIX record lock, which a forked child does not inherit: a builder that is killed
leaves nothing behind in its data loaders. The kernel of the operating system gives such a lock to a
whole process, and takes it back when any descriptor of the file is closed; so threads exclude each
other by a table of what this process holds, and no file is opened twice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

_guard = threading.Lock()
_held: set[str] = set()


def _forget() -> None:
    """Empty the table in a forked child, which holds none of its parent's locks."""
    global _guard
    _guard = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


class FileLock:
    """A locked file, open for reading and writing until `release`."""

    def __init__(self, path: Path, place: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._place = place

    def release(self) -> None:
        """Close the file, which frees the lock; the file stays."""
        try:
            os.close(self.descriptor)
        finally:
            _held.discard(self._place)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(path: Path, *, create: bool = True) -> FileLock | None:
    """The lock of the file at `path`, made where it is missing; None where another holds it.

    Nothing is created, or opened, through a link in the file's place.
    Raises: OSError where it cannot be opened (a link: ELOOP), is no regular file, or lies on a file
    system without locks; FileNotFoundError where it is missing and `create` is False.
    """
    return _locked(path, os.O_CREAT if create else 0, 0o644, required=True)


def make_locked(path: Path) -> FileLock | None:
    """A new file, locked where its file system has locks; None where a sweeper took it at once.

    Raises: OSError where it cannot be made, or something is at `path`.
    """
    return _locked(path, os.O_CREAT | os.O_EXCL, 0o666, required=False)


def sweep(paths: Iterator[Path]) -> None:
    """Remove those of the files that nobody holds."""
    for path in paths:
        with contextlib.suppress(OSError):
            if (lock := try_lock(path, create=False)) is not None:
                with lock:
                    # Whoever has opened it meanwhile finds, once it has the lock, that it is gone.
                    path.unlink()


def _locked(path: Path, flags: int, mode: int, required: bool) -> FileLock | None:
    place = os.path.join(os.path.realpath(path.parent), path.name)
    with _guard:
        if place in _held:
            return None
        _held.add(place)
    descriptor = None
    try:
        descriptor = _open_locked(path, flags, mode, required)
    finally:
        if descriptor is None:
            _held.discard(place)
    return None if descriptor is None else FileLock(path, place, descriptor)


def _open_locked(path: Path, flags: int, mode: int, required: bool) -> int | None:
    """A descriptor that holds the lock, or None where another process holds it."""
    # Never blocks, should a pipe lie in the file's place.
    always = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, always | flags, mode)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN) or required:
                raise
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return descriptor
    except (BlockingIOError, PermissionError, FileNotFoundError):
        pass  # held by another process, or swept between open and lock
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
