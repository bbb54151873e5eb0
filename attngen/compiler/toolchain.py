"""Toolchain: the version of NVRTC, as a cache's entries name it, with and without loading it.

Before NVRTC is loaded, which a hit in the cache never does, the packages that are installed say
what it is; afterwards the library itself, since another one may have been found: a toolkit of the
system, or one that the process had loaded already.
"""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from pathlib import Path

BINDINGS = "cuda-bindings"
NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
_loaded: str | None = None


def installed_toolchain() -> str | None:
    """The version of the NVRTC that is loaded, else of the one that is installed (`13.0.88`); None
    where there is none."""
    return _loaded or packaged_toolchain()


@cache
def packaged_toolchain() -> str | None:
    """The version of the installed NVRTC, from its package's metadata; None where there is none.

    Where several are installed (PyTorch brings its own), the first that fits the bindings' major
    version, since that is the one they load.
    """
    package = _package()
    return None if package is None else _version(package)


def note_loaded(major: int, minor: int) -> None:
    """Tell that the bindings have loaded an NVRTC, which says that it has this version."""
    global _loaded
    _loaded = label_of(major, minor, mapped_file(f"libnvrtc.so.{major}"))


def label_of(major: int, minor: int, file: str | None) -> str:
    """The version of a loaded NVRTC as fully as its package, its file's name or it itself says."""
    version, package = f"{major}.{minor}", _package()
    if package is not None:
        packaged = _version(package) or ""
        folder = Path(str(importlib.metadata.distribution(package).locate_file("nvidia")))
        inside = file is None or Path(file).is_relative_to(folder.resolve())
        if inside and f"{packaged}.".startswith(f"{version}."):
            return packaged
    named = re.search(r"\.so\.(\d+(?:\.\d+)+)$", file or "")
    if named and f"{named[1]}.".startswith(f"{version}."):
        return named[1]
    return version


def mapped_file(name: str) -> str | None:
    """The file of a library that this process has loaded. Source: /proc/self/maps."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return next((path for path in paths if Path(path).name.startswith(name)), None)


def _package() -> str | None:
    found = {name: version for name in NVRTC_PACKAGES if (version := _version(name)) is not None}
    major = (_version(BINDINGS) or "").partition(".")[0]
    fitting = [name for name, version in found.items() if version.partition(".")[0] == major]
    return next(iter(fitting or found), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
