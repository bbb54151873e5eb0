"""CUTLASS: the wrappers of instructions that kernels of some families include from its package.

They go to the compiler in memory, beside headers of our own that stand in for what they include
(attngen/cuda/include/cute). The package is found by its metadata and never imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Collection
from functools import cache
from typing import Any

from ..errors import CompilerMissing
from ..io import files

PACKAGE = "nvidia-cutlass"
_INSIDE = "cutlass_library/source/include"
_INCLUDE = re.compile(rb'^#include [<"]([^>"]+)[>"]', re.MULTILINE)
# The wrappers by the name they are included by, with the sha256 of their text in 4.2.0: what keys
# have where neither the package nor a wheel's record says otherwise.
ATOMS = {
    "cute/arch/copy_sm75.hpp": "6a46942a2e85cbb2c542ccbcaffad76f85c4afde033437b290b9be32867b1155",
    "cute/arch/copy_sm80.hpp": "f98ebf662eb95419bf2dfcbcbe9b9e54ba0fd965b8d65f5a850f56c71b158b94",
    "cute/arch/mma_sm80.hpp": "4d1315c12cccc6652a1dced6d6cb2d13a0390da5829978b5e01895571b677a60",
    "cute/arch/mma_sm89.hpp": "fd7e5afd5b45bfbb33558d6b2e3718b8e4ffe370228460e91bf4a7ca7167b2ee",
}


def read_atoms() -> dict[str, bytes]:
    """The wrappers' texts as they are installed, by the names they are included by; nothing where
    the package is missing, or lacks one."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return {}
    place: Any = package.locate_file(_INSIDE)  # a folder, or one in an archive
    paths = {name: place.joinpath(*name.split("/")) for name in ATOMS}
    if not all(path.is_file() for path in paths.values()):
        return {}
    return {name: path.read_bytes() for name, path in paths.items()}


@cache
def atoms() -> dict[str, bytes]:
    """The wrappers' texts, read once a process."""
    return read_atoms()


def version() -> str | None:
    """The installed package's version; None where there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def digest_atoms(found: dict[str, bytes]) -> dict[str, str]:
    """The sha256 (hex) of each wrapper: of these texts, else as the wheel recorded, else as tested.

    found: as `read_atoms` has them.
    """
    recorded = files.record().get("cutlass", {})
    known = {**ATOMS, **{name: recorded[name] for name in ATOMS if name in recorded}}
    return known | {name: hashlib.sha256(text).hexdigest() for name, text in found.items()}


@cache
def digests() -> dict[str, str]:
    """The digests that keys of this process have."""
    return digest_atoms(atoms())


def included(text: str) -> frozenset[str]:
    """The wrappers that a source includes, itself or by headers of ours."""
    return _included_by(text.encode())


def supply(text: str) -> dict[str, bytes]:
    """The texts of the wrappers that a source includes.

    Raises: CompilerMissing where the package is missing, or is one that lacks them.
    """
    wanted = included(text)
    if not wanted:
        return {}
    known = atoms()
    if not known:
        why = f"of version {version()} lacks {', '.join(sorted(wanted))}"
        raise CompilerMissing(PACKAGE, *((why,) if version() else ()))
    return {name: known[name] for name in wanted}


@cache
def _included_in(header: str) -> frozenset[str]:
    return _included_by(files.headers()[header])


def _included_by(text: bytes) -> frozenset[str]:
    names = {name.decode() for name in _INCLUDE.findall(text)}
    inner = (_included_in(name) for name in names if name in files.headers())
    return frozenset(names & ATOMS.keys()).union(*inner)


def have_changed(known: Collection[str]) -> bool:
    """Whether one of these wrappers is another on the disk than when this process read it."""
    now = digest_atoms(read_atoms()) if known else {}
    return any(now[name] != digests()[name] for name in known)
