"""Fragments: which masks, scores, softmaxes … exist, read from the headers of their files.

A fragment is a file `templates/<axis>/<name>.cuh.j2`: a TOML header in the leading template
comment, then one macro `emit` that renders one struct. Dropping a file in is all it takes. Masks
and scores of one's own come from folders that ATTNGEN_FRAGMENTS names, and from
`register_fragment`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from ..errors import SpecError
from ..io.files import read_regular, shipped, templates_dir
from ..io.values import from_data
from .header import AXES, CALLED_AXES, SUFFIX, Fragment, Operand, parse_header, read_header
from .lowering import fragment_of
from .mask_lowering import mask_fragment_of
from .program import Program
from .program_text import programs_in

__all__ = ["AXES", "Features", "Fragment", "Operand", "read_header", "register_fragment", "scan"]

VARIABLE = "ATTNGEN_FRAGMENTS"
Features = dict[str, dict[str, Fragment]]
_MOST_BYTES = 1 << 20  # of a fragment's file
_lock = threading.Lock()


def scan(root: Path | None = None) -> Features:
    """All fragments: axis → name → Fragment. root: those of another folder of templates alone.

    By default those of the shipped templates (where these were removed, what the wheel says of
    them), with the user's own beside them; what is registered later appears in the same value.
    Raises: ValueError naming the file whose header is missing or wrong; FileNotFoundError;
    SpecError of a file in a folder that ATTNGEN_FRAGMENTS names.
    """
    return _known() if root is None else _scan(root)


def register_fragment(path: str | os.PathLike[str]) -> Fragment:
    """Make a mask or a score of one's own known to specs, calls and the command of this process.

    path: its file, `<name>.cuh.j2`, whose header says `axis = "mask"` or `"score"`, or which lies
    in a folder of that name. A file that was registered before changes nothing.
    Raises: SpecError where it is no fragment, or another one has its name.
    """
    known, place = _known(), Path(path)
    fragment = _read_own(place)
    with _lock:
        _add(known, fragment, place)
    return known[fragment.axis][fragment.name]


def register_program(program: Program) -> Fragment:
    """The fragment of a program, known to calls of this process from now on."""
    known = _known()["mask" if program.is_mask else "score"]
    if program.name not in known:
        with _lock:
            made = mask_fragment_of if program.is_mask else fragment_of
            known[program.name] = made(program)
            _programs[program.name] = program
    return known[program.name]


def program_named(name: str) -> Program | None:
    """The program that a fragment of that name was registered of; None of any other."""
    return _programs.get(name)


_programs: dict[str, Program] = {}


def register_programs(texts: Iterable[str]) -> None:
    """Make the programs among texts and digests of fragments known, as `register_program` does.

    Raises: ValueError where a text is of no program.
    """
    for program in programs_in(texts):
        register_program(program)


@cache
def _known() -> Features:
    """The shipped fragments and those of the environment, in a value that registering adds to."""
    found = _read_shipped() if shipped() is not None else _scan(templates_dir())
    known = {axis: dict(fragments) for axis, fragments in found.items()}
    for path in _environment_paths():
        _add(known, _read_own(path), path)
    return known


def _environment_paths() -> Iterator[Path]:
    """Files in the folders that the environment names, and in their folders `mask` and `score`."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        folder = Path(os.path.expanduser(name))
        if not folder.is_dir():
            raise SpecError(f"{VARIABLE}: {folder} is no folder")
        for each in (folder, *(folder / axis for axis in CALLED_AXES)):
            yield from sorted(each.glob(f"*{SUFFIX}"))


def _read_own(path: Path) -> Fragment:
    """The fragment of a user's file, with its text. Raises: SpecError."""
    try:
        text = read_regular(path, _MOST_BYTES).decode()
        fragment = replace(parse_header(text, path), text=text)
    except (OSError, ValueError) as error:
        reason = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise SpecError(reason) from error
    if not fragment.called:
        raise SpecError(f"{path}: selected_by is for attngen's own fragments")
    return fragment


def _add(known: Features, fragment: Fragment, path: Path) -> None:
    """Raises: SpecError where another fragment has its name, or its struct's."""
    for other in (each for fragments in known.values() for each in fragments.values()):
        if other == fragment:
            return
        whose = f"another {other.axis}, {'of attngen' if other.text is None else 'of a file'}, has"
        if (other.axis, other.name) == (fragment.axis, fragment.name):
            raise SpecError(f"{path}: {whose} the name {fragment.name!r} already")
        if other.struct == fragment.struct:
            raise SpecError(f"{path}: {whose} the struct {fragment.struct!r} already")
    known[fragment.axis][fragment.name] = fragment


@cache
def _read_shipped() -> Features:
    axes = (shipped() or {})["features"]
    return {
        axis: {name: from_data(Fragment, data) for name, data in fragments.items()}
        for axis, fragments in axes.items()
    }


@cache
def _scan(root: Path) -> Features:
    found: Features = {axis: {} for axis in AXES}
    for axis in AXES:
        for path in sorted((root / axis).glob(f"*{SUFFIX}")):
            fragment = read_header(path, axis)
            found[axis][fragment.name] = fragment
    return found
