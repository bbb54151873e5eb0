"""Mounts: the bundles in which a call looks for its kernels before it compiles any.

Looked through in this order: those of `load_bundle`, the latest first; the files that
ATTNGEN_BUNDLES names, separated as in PATH; the packages that declare an entry point in the group
`attngen.bundles`, each a function without arguments that returns the path of its bundle.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shlex
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError
from ..fragments import features
from ..io.values import to_json
from ..kernels.selection import name_of as name_of_kernel
from ..kernels.selection import of_call
from ..runtime.program import Binary
from ..spec import resolve
from ..spec.attention_spec import AttentionSpec, checked, load_specs
from ..spec.problem import Problem, Variant
from ..targets.target import TARGETS, Target, earlier_of
from .bundle import Bundle, Program, name_of

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

    variant: Variant
    used: Path
    shadowed: Path
    differing: bool


def load_bundle(
    path: str | os.PathLike[str],
    *,
    require: str | os.PathLike[str] | Iterable[AttentionSpec] | None = None,
) -> Bundle:
    """Mounts a bundle before all others: calls that have not found their kernels yet find them
    there.

    require: specs, or the TOML file that has them, for which the mounted bundles must have every
    kernel.
    Raises: BundleError where it is damaged, or with all that is missing and the command that builds
    it, and SpecError; then it is not mounted.
    """
    bundle = Bundle(path)
    if isinstance(require, (str, os.PathLike)):
        specs = load_specs(os.fspath(require))
        check_complete([bundle, *mounted()], specs, shlex.quote(os.fspath(require)))
    elif require is not None:
        check_complete([bundle, *mounted()], require)
    with _lock:
        _loaded[:] = [bundle, *(each for each in _loaded if each.sha256 != bundle.sha256)]
    _report_hidden(bundle)
    return bundle


def mounted() -> list[Bundle]:
    """Every mounted bundle, in the order in which they are looked through.

    Raises: BundleError where one that the environment or a package names is damaged.
    """
    global _found
    if _found is None:  # outside the lock: a package's code runs here, and may mount one itself
        found = [Bundle(path) for path in _environment_paths()]
        with _lock:
            _found = found
    with _lock:
        return [*_loaded, *_found]


def find(
    problem: Problem, arch: str, kernel: str | None = None
) -> tuple[tuple[Binary, bytes], ...] | None:
    """Launch programs and cubins of a problem, from the first mounted bundle that has them; else
    from the first that has those of an earlier minor version whose kernels the architecture's
    shared memory holds; None where none has. kernel: as `builder.find_kernels` has it. Raises:
    BundleError.
    """
    for name in (arch, *(each.name for each in earlier_of(arch))):
        for bundle in mounted():
            program = bundle.program(problem, name)
            if program is not None and (name == arch or _fits(program, TARGETS[arch])):
                log.debug("%s: found in %s", program.name, bundle.path)
                wanted = of_call(program.binaries, lambda each: name_of_kernel(each.kernel), kernel)
                return tuple((binary, bundle.cubin(binary)) for binary in wanted)
    return None


def _fits(program: Program, target: Target) -> bool:
    """Whether a CTA of each kernel has the shared memory there that it asks for."""
    return all(each.kernel.smem_bytes <= target.cta_smem_bytes for each in program.binaries)


def check_complete(
    bundles: Iterable[Bundle], specs: Iterable[AttentionSpec], file: str = "SPECS.toml"
) -> None:
    """Refuses bundles that lack a kernel of these specs, found in the file that is named.

    Raises: BundleError with all that is missing and the command that builds it; SpecError.
    """
    known = {key for bundle in bundles for key in bundle.problems}
    missing: dict[str, None] = {}
    for spec in map(checked, specs):
        for problem in resolve.resolve(spec, features.scan()):
            for arch in spec.arch:
                if (problem, arch) not in known:
                    what = f"{name_of((problem, arch))} for {spec.title}"
                    missing[f"no bundle has {what}"] = None
    if missing:
        command = f"attngen bundle build {file} -o NAME.attn"
        raise BundleError([*missing, f"build them: {command}"])


def explain_absence(problem: Problem, arch: str) -> list[str]:
    """Where a problem's kernels were looked for, and the command that makes a bundle of them."""
    paths = ", ".join(str(bundle.path) for bundle in mounted())
    line = to_json({"arch": arch, "problem": problem})
    return [
        f"{name_of((problem, arch))} is in no mounted bundle; mounted: {paths or 'none'}",
        f"a bundle with it: echo {shlex.quote(line)} | "
        "attngen bundle build --from-trace - -o NAME.attn",
    ]


def find_shadowed(bundles: Iterable[Bundle]) -> list[Shadowed]:
    """Every problem that more than one of the bundles has, which are in the order of mounting.

    Raises: BundleError.
    """
    first: dict[Variant, Bundle] = {}
    found = []
    for bundle in bundles:
        for key in bundle.problems:
            used = first.setdefault(key, bundle)
            if used is not bundle:
                differing = used.differs(bundle, key)
                found.append(Shadowed(key, used.path, bundle.path, differing))
    return found


def _report_hidden(bundle: Bundle) -> None:
    """Logs, once for each other bundle, which of its kernels one just mounted hides."""
    hidden: dict[Path, list[str]] = {}
    for each in find_shadowed(mounted()):
        if each.used == bundle.path and each.differing:
            hidden.setdefault(each.shadowed, []).append(name_of(each.variant))
    for path, names in hidden.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        log.warning("%s hides other kernels of %s: %s%s",
                    bundle.path, path, ", ".join(names[:3]), more)  # fmt: skip


def _environment_paths() -> list[Path]:
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    paths = [Path(os.path.expanduser(name)) for name in named if name]
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda each: each.name):
        try:
            paths.append(Path(point.load()()))
        except Exception as error:  # a package of someone else's
            raise BundleError(f"entry point {point.name} of {GROUP}: {error!r}") from error
    return paths
