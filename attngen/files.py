"""Where the templates and CUDA headers lie, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path

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
def include_dir() -> Path:
    """Root of the CUDA headers, included as `attngen/…`."""
    return _PACKAGE / "cuda" / "include"


@cache
def headers() -> dict[str, bytes]:
    """Every CUDA header by the name it is included by."""
    root = include_dir()
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*.cuh"))
    }
