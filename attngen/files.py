"""Where the templates and CUDA headers lie, in a checkout and in an installed wheel alike; how a
file is put in place in one step."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

SHIPPED = "shipped.json"
_PACKAGE = Path(__file__).resolve().parent


@cache
def templates_dir() -> Path:
    """Root of the templates: inside the package when installed, beside it in a checkout.

    Raises: FileNotFoundError where neither exists.
    """
    for candidate in (_PACKAGE / "templates", _PACKAGE.parent / "templates"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"no templates beside or inside {_PACKAGE}: reinstall attngen")


@cache
def shipped() -> dict[str, Any] | None:
    """What a wheel says of the templates and headers that it was made with, for a machine from
    which they were removed; None where they are there, and speak for themselves.

    The fragments' headers (`features`), and the digests that are part of cache keys (`templates`,
    `headers`). Written when the wheel is built.
    """
    with contextlib.suppress(FileNotFoundError):
        if templates_dir() and include_dir().is_dir():
            return None
    path = _PACKAGE / SHIPPED
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


@cache
def include_dir() -> Path:
    """Root of the CUDA headers, included as `attngen/…`."""
    return _PACKAGE / "cuda" / "include"


@cache
def headers() -> dict[str, bytes]:
    """Every CUDA header by the name it is included by."""
    root = include_dir()
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.cuh"))
    }


def read_at_most(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a file, or of a device or pipe in its place.

    Raises: OSError; ValueError where there are more than the limit.
    """
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    return data


def can_write_into(folder: Path) -> bool:
    """Whether files may be made in a folder, or in one made in its place; nothing is made."""
    places = (folder, *folder.absolute().parents)
    existing = next(place for place in places if os.path.exists(place))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file, synced and put in the place of `path` where the block ends without an error.

    Whoever has the old one open keeps it. A link's target is replaced, not the link.
    Raises: OSError; where something other than a file is in that place.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path}: is no file, and is not replaced by one")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        try:
            opened = open(aside, "x+b")
        except OSError as error:  # by the name that the caller knows
            raise OSError(error.errno, error.strerror, str(path)) from error
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
