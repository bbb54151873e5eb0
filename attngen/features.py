"""Fragments: which masks, scores, softmaxes … exist, read from the headers of their files.

A fragment is a file `templates/<axis>/<name>.cuh.j2`: a TOML header in the leading template
comment, then one macro `emit` that renders one struct. Dropping a file in is all it takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .files import templates_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AXES = ("mask", "score", "softmax", "sequence", "fetch", "iteration")
DOMAINS = ("scalar",)


@dataclass(frozen=True)
class Operand:
    """A run-time value that a fragment reads: by what it is indexed, and its dtype."""

    name: str
    domain: str
    dtype: str
    doc: str


@dataclass(frozen=True)
class Fragment:
    """The header of one fragment. `bounds` says on which sides a mask limits its rows."""

    axis: str
    name: str
    doc: str
    struct: str
    bounds: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def template(self) -> str:
        return f"{self.axis}/{self.name}.cuh.j2"


Features = dict[str, dict[str, Fragment]]


def scan(root: Path | None = None) -> Features:
    """All fragments under `root` (the shipped templates by default): axis → name → Fragment.

    Raises: ValueError naming the file whose header is missing or wrong.
    """
    return _scan(root or templates_dir())


@cache
def _scan(root: Path) -> Features:
    found: Features = {axis: {} for axis in AXES}
    for axis in AXES:
        for path in sorted((root / axis).glob("*.cuh.j2")):
            fragment = read_header(path, axis)
            found[axis][fragment.name] = fragment
    return found


def read_header(path: Path, axis: str) -> Fragment:
    """The fragment that the file at `path` declares."""
    text = path.read_text()
    head, closed, _ = text.removeprefix("<#").partition("#>")
    if not text.startswith("<#") or not closed:
        raise ValueError(f"{path}: a fragment starts with its TOML header between <# and #>")
    try:
        data: dict[str, Any] = tomllib.loads(head)
        operands = tuple(Operand(**item) for item in data.pop("operand", []))
        bounds = tuple(data.pop("bounds", []))
        fragment = Fragment(axis=axis, bounds=bounds, operands=operands, **data)
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if fragment.template != f"{axis}/{path.name}":
        raise ValueError(f"{path}: the header's name is {fragment.name!r}, not the file's")
    if unknown := [o.name for o in operands if o.domain not in DOMAINS]:
        raise ValueError(f"{path}: operands {unknown} have no known domain; known: {DOMAINS}")
    return fragment
