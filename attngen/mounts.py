"""Mounts: the bundles in which a call looks for its kernels before it compiles any.

Looked through in this order: those of `load_bundle`, the latest first; the files that
ATTNGEN_BUNDLES names, separated as in PATH; the packages that declare an entry point in the group
`attngen.bundles`, each a function without arguments that returns the path of its bundle.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import features, resolve
from .bundle import Bundle, Program
from .errors import BundleError
from .problem import Problem
from .spec import AttentionSpec, load_specs

log = logging.getLogger("attngen")

GROUP = "attngen.bundles"
VARIABLE = "ATTNGEN_BUNDLES"
_lock = threading.Lock()
_loaded: list[Bundle] = []
_found: list[Bundle] | None = None


@dataclass(frozen=True)
class Shadowed:
    """A problem for which a mounted bundle has kernels that are never used, since another one has
    kernels for it too. `differing`: and they are others."""

    problem: Problem
    arch: str
    used: Path
    shadowed: Path
    differing: bool


def load_bundle(
    path: str | os.PathLike[str],
    *,
    require: str | os.PathLike[str] | Iterable[AttentionSpec] | None = None,
) -> Bundle:
    """Mounts a bundle before all others: calls find their kernels in it.

    require: specs, or the TOML file that has them, for which the mounted bundles must have every
    kernel.
    Raises: BundleError where it is damaged, or with all that is missing and the command that builds
    it; SpecError.
    """
    bundle = Bundle(path)
    with _lock:
        _loaded.insert(0, bundle)
    _report_shadowed(bundle)
    if require is not None:
        file, specs = "SPECS.toml", require
        if isinstance(require, (str, os.PathLike)):
            file, specs = os.fspath(require), load_specs(require)  # type: ignore[arg-type]
        if missing := find_missing(specs):  # type: ignore[arg-type]
            raise BundleError([*missing, f"build them: attngen bundle build {file} -o NAME.attn"])
    return bundle


def mounted() -> list[Bundle]:
    """Every mounted bundle, in the order in which they are looked through.

    Raises: BundleError where one that the environment or a package names is damaged.
    """
    global _found
    with _lock:
        if _found is None:
            _found = [Bundle(path) for path in _environment_paths()]
        return [*_loaded, *_found]


def find(problem: Problem, arch: str) -> Program | None:
    """The kernels of a problem, from the first mounted bundle that has them; None without one.

    Raises: BundleError.
    """
    for bundle in mounted():
        program = bundle.program(problem, arch)
        if program is not None:
            log.debug("%s: found in %s", problem.label, bundle.path)
            return program
    return None


def find_missing(specs: Iterable[AttentionSpec]) -> list[str]:
    """What the specs ask for and no mounted bundle has, one line each. Raises: SpecError."""
    known = {key for bundle in mounted() for key in bundle.problems}
    missing: dict[str, None] = {}
    for spec in specs:
        for problem in resolve.resolve(spec, features.scan()):
            for arch in spec.arch:
                if (problem, arch) not in known:
                    what = f"{problem.label} ({problem.direction}, {arch})"
                    missing[f"no mounted bundle has {what} for {spec.title}"] = None
    return [*missing]


def find_shadowed() -> list[Shadowed]:
    """Every problem that more than one mounted bundle has. Raises: BundleError."""
    first: dict[tuple[Problem, str], Bundle] = {}
    found = []
    for bundle in mounted():
        for key in bundle.problems:
            used = first.setdefault(key, bundle)
            if used is not bundle:
                found.append(Shadowed(*key, used.path, bundle.path, _differ(used, bundle, key)))
    return found


def _differ(a: Bundle, b: Bundle, key: tuple[Problem, str]) -> bool:
    ours, theirs = a.program(*key), b.program(*key)
    return ours is None or theirs is None or ours.identity != theirs.identity


def _report_shadowed(bundle: Bundle) -> None:
    """Logs where a bundle just mounted hides other kernels."""
    for each in find_shadowed():
        if each.used == bundle.path and each.differing:
            log.warning("%s on %s: %s hides other kernels of %s",
                        each.problem.label, each.arch, each.used, each.shadowed)  # fmt: skip


def _environment_paths() -> list[Path]:
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    paths = [Path(os.path.expanduser(name)) for name in named if name]
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda each: each.name):
        try:
            paths.append(Path(point.load()()))
        except Exception as error:  # a package of someone else's
            raise BundleError(f"entry point {point.name} of {GROUP}: {error!r}") from error
    return paths
