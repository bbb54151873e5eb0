"""Where the templates and CUDA headers lie, in a checkout and in an installed wheel alike; how
files of users are read, and how they are written: whole or not at all, and never over others'."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pkgutil
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from . import file_lock
from .text import printable

SHIPPED = "shipped.json"
_PACKAGE = Path(__file__).resolve().parents[1]


@cache
def templates_dir() -> Path:
    """Root of the templates: inside the package when installed, beside it in a checkout.

    Raises: FileNotFoundError where neither exists.
    """
    for candidate in (_PACKAGE / "templates", _PACKAGE.parent / "templates"):
        if candidate.is_dir():
            return candidate
    archive = next((place for place in _PACKAGE.parents if place.is_file()), None)
    if archive is not None:
        raise FileNotFoundError(
            f"attngen runs from {archive}, out of which its templates and headers cannot be read: "
            "unpack it, or install it with pip, where kernels are built"
        )
    raise FileNotFoundError(f"no templates beside or inside {_PACKAGE}: reinstall attngen")


@cache
def shipped() -> dict[str, Any] | None:
    """Read the wheel's record of its templates and headers; None where these are installed.

    A machine from which they were removed needs the record. It has the fragments' headers
    (`features`) and the digests that are part of cache keys (`templates`, `headers`, `cutlass`),
    and is written when the wheel is built.
    """
    with contextlib.suppress(FileNotFoundError):
        if templates_dir() and include_dir().is_dir():
            return None
    return record() or None


@cache
def record() -> dict[str, Any]:
    """Read the wheel's record, whether its files were removed or not; empty in a checkout."""
    with contextlib.suppress(OSError):
        data = pkgutil.get_data("attngen", SHIPPED)  # out of an archive, too
        return {} if data is None else json.loads(data)
    return {}


@cache
def include_dir() -> Path:
    """Root of the CUDA headers, included as `attngen/…`."""
    return _PACKAGE / "cuda" / "include"


@cache
def headers() -> dict[str, bytes]:
    """Every CUDA header by the name it is included by; those of the suffix .hpp stand in for others
    of CUTLASS's (compiler/cutlass.py)."""
    root = include_dir()
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".cuh", ".hpp"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def can_write_into(folder: Path) -> bool:
    """Whether files may be made in a folder, or in one made in its place; nothing is made."""
    places = (folder, *folder.absolute().parents)
    existing = next(place for place in places if os.path.exists(place))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def make_directory(path: Path) -> None:
    """Make a directory that only its user may write to, whatever the umask, and what is above it.

    One that is there stays as it is. Raises: OSError, also where a link is in its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o755)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "no directory of attngen's own", str(path))


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """All bytes of a file that is no pipe and no device, which could make a reader wait for ever.

    Raises: OSError, also where it is longer than `most_bytes`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Some systems' files say that they are empty; a longer one may grow.
        data = b"" if size > most_bytes else file.read(min(most_bytes, size or most_bytes) + 1)
    if max(size, len(data)) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return data


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, open for reading; a link to one is followed.

    Raises: OSError, also where it is a pipe, a device or a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file, but a pipe or a device", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_own(path: Path, recognise: Callable[[Path], bool], kind: str) -> None:
    """Refuse to replace a file that is not of the kind that attngen writes there.

    recognise: whether a regular file, which has a byte at least, is of that kind.
    Raises: OSError.
    """
    if not os.path.lexists(path):
        return
    name, advice = printable(str(path)), "name another file, or take it away"
    if not path.is_file():  # nothing else is opened: a pipe would wait
        if path.exists():  # and not a link to where nothing is yet
            raise OSError(f"{name} is no file, is no {kind}, and is not replaced by one: {advice}")
    elif path.stat().st_size and not recognise(path):
        raise OSError(f"{name} is no {kind}, and is not replaced by one: {advice}")


@contextlib.contextmanager
def replacing(
    path: Path, recognise: Callable[[Path], bool] | None = None, kind: str = "file"
) -> Iterator[BinaryIO]:
    """A new file, synced and put in the place of `path` where the block ends without an error.

    Whoever has the old one open keeps it. A link's target is replaced, not the link. What writers
    that were killed left beside it is removed. recognise, kind: as `require_own` has them; without
    them any file is replaced.
    Raises: OSError, which names the file; where what is there is another's, or no file.
    """
    own = recognise or (lambda _: True)
    require_own(path, own, kind)
    with _written_aside(path) as (file, aside, target):
        yield file
        _sync(file)
        require_own(path, own, kind)  # it may have come meanwhile
        os.replace(aside, target)


@contextlib.contextmanager
def creating(path: Path) -> Iterator[BinaryIO]:
    """A new file, synced and put at `path`, where nothing is, once the block ends without an error.

    Raises: FileExistsError where something is there; OSError, which names the file.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with _written_aside(path) as (file, aside, target):
        yield file
        _sync(file)
        try:
            os.link(aside, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without links: the name is taken first, and then filled
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.replace(aside, target)


@contextlib.contextmanager
def _written_aside(path: Path) -> Iterator[tuple[BinaryIO, Path, Path]]:
    """A file beside the target of `path`, with its name and the target's; gone in the end.

    It is locked until then, so that a sweeper knows that its writer lives.
    """
    target = aside = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep_beside(target)
        lock = None
        while lock is None:
            aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            lock = file_lock.make_locked(aside)
        with lock:
            try:
                with open(lock.descriptor, "r+b", closefd=False) as file:
                    yield file, aside, target
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:  # by the name that the caller knows
        named = None if error.filename is None else str(error.filename)
        if error.errno is None or named not in (None, str(aside), str(target)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sweep_beside(target: Path) -> None:
    """Remove what writers of the file that were killed left beside it."""
    leftover = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    with contextlib.suppress(OSError):  # of a folder whose names may not be read
        names = [name for name in os.listdir(target.parent) if leftover.fullmatch(name)]
        file_lock.sweep(target.with_name(name) for name in names)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
