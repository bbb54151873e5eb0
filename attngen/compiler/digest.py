"""Digest: the key under which a compiled kernel is cached, found without any compiler.

A key holds everything that decides the bytes of a cubin and its launch program, and nothing else:
no path, no time stamp, no tensor, no length. The compiler's version stands beside the digest, so
that a machine without a compiler can use what any compiler built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

from ..fragments.features import AXES
from ..io import files
from ..io.modules import modules_of
from ..io.values import to_data, to_json
from ..kernels.base import KernelPlan
from ..runtime.program import SCHEMA_VERSION
from ..spec.problem import Problem
from . import cutlass
from .compile import OPTIONS
from .toolchain import installed_toolchain

# What turns a problem and its plan into a cubin and a launch program, and fills its parameters:
# what a plan computes of itself shapes a kernel as much as what it holds. These modules belong to
# the key as the templates do: a changed parameter layout must not find the old kernel. Of packages
# every module does, so that one that is new is not forgotten.
_PACKAGES = ("fragments", "kernels", "targets")
_MODULES = (
    *("compiler.builder", "compiler.compile", "compiler.cutlass", "io.files", "io.values"),
    *("spec.problem", "runtime.geometry", "runtime.parameters", "runtime.program"),
    "runtime.run_time",
)
_FOUND = frozenset(name for each in _PACKAGES for name in modules_of(each))
# What chooses among plans, which a key has in full, or among kernels that are built.
CHOOSES = frozenset(
    name for name in _FOUND if name in ("kernels.tuned", "kernels.selection") or ".cost" in name
)
GENERATOR = tuple(sorted({*_MODULES, *_FOUND} - CHOOSES))
# Of a code object, beside its constants: all but names of files and numbers of lines.
_CODE_FACTS = (
    *("co_name", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code"),
    *("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
)


@dataclass(frozen=True)
class CacheKey:
    """The name by which the cache knows a kernel, and all that the name stands for.

    digest: sha256 of `material`, hex. toolchain: version of the NVRTC loaded or installed here
    (`13.0.88`), None where there is none. material: the key in full, canonical JSON. label: the
    kernel's name without its digest. command: a shell command, free of paths, that builds the
    kernel.
    """

    digest: str
    toolchain: str | None
    label: str
    material: str
    command: str


def cache_key(problem: Problem, plan: KernelPlan, arch: str) -> CacheKey:
    """The key of the kernel that computes `problem` as `plan` says on `arch`.

    Imports neither the template engine nor the compiler.
    Raises: FileNotFoundError where the templates or this package's sources are missing.
    """
    known = cutlass.digests() if plan.atoms else {}
    material = to_json(
        {
            "schema": SCHEMA_VERSION,
            "arch": arch,
            "problem": to_data(problem),
            "plan": to_data(plan),
            "flags": list(OPTIONS),
            **key_digests(problem),
            **({"cutlass": {name: known[name] for name in plan.atoms}} if plan.atoms else {}),
        }
    )
    return CacheKey(
        digest=digest_text(material),
        toolchain=installed_toolchain(),
        label=f"{plan.family}__{problem.label}",
        material=material,
        command=build_command(problem, arch),
    )


def digest_text(text: str) -> str:
    """sha256 of the text, hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_files(contents: Mapping[str, bytes]) -> str:
    """sha256 (hex) over names and contents, in the order of the names; both are length-prefixed,
    so that no byte can move from one file or name to its neighbour unnoticed."""
    state = hashlib.sha256()
    for name in sorted(contents):
        for part in (name.encode(), contents[name]):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def read_tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` by its name relative to it, hidden ones (editors' own) left out."""
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = path.read_bytes()
    return found


def read_module(name: str) -> bytes:
    """The bytes of a module of this package: of its source, else of its code, which depends on
    the version of Python. Nothing is imported.

    Raises: FileNotFoundError where neither is there.
    """
    full = f"attngen.{name}"
    spec = importlib.util.find_spec(full)
    loader: Any = None if spec is None else spec.loader
    if spec is not None and spec.origin and spec.origin.endswith(".py"):
        try:
            return bytes(loader.get_data(spec.origin))
        except (OSError, AttributeError):
            pass  # a bundler of applications names the file that it took in
    code = loader.get_code(full) if hasattr(loader, "get_code") else None
    if not isinstance(code, CodeType):
        raise FileNotFoundError(
            f"{full} has neither source nor bytecode here, of which the keys of kernels are made: "
            "install attngen's .py or .pyc files, or use a bundle of kernels"
        )
    return repr((sys.version_info[:2], _facts_of(code))).encode()


def _facts_of(constant: object) -> object:
    """A constant of a module's code, free of places, addresses and orders by chance."""
    if isinstance(constant, CodeType):
        facts = [getattr(constant, name, None) for name in _CODE_FACTS]
        return facts, [_facts_of(each) for each in constant.co_consts]
    if isinstance(constant, tuple):
        return tuple(_facts_of(each) for each in constant)
    if isinstance(constant, frozenset):
        return "frozenset", sorted(repr(_facts_of(each)) for each in constant)
    return constant


@dataclass(frozen=True)
class Shipped:
    """Digests of files that a wheel ships: of all templates but fragments, of all headers, and of
    each fragment by its name under the templates' root."""

    templates: str
    headers: str
    fragments: dict[str, str]


def read_shipped() -> Shipped:
    """Digests of the files as they are on the disk. Raises: FileNotFoundError."""
    found = read_tree(files.templates_dir())
    fragments = {name for name in found if name.partition("/")[0] in AXES}
    return Shipped(
        templates=digest_files({n: content for n, content in found.items() if n not in fragments}),
        headers=digest_files(files.headers()),
        fragments={name: hashlib.sha256(found[name]).hexdigest() for name in sorted(fragments)},
    )


@cache
def _shipped() -> Shipped:
    """Digests of the shipped files, read once a process; where templates or headers were removed,
    those that the wheel recorded. Raises: FileNotFoundError."""
    said = files.shipped()
    if said is None:
        return read_shipped()
    return Shipped(said["templates"], said["headers"], said["fragments"])


@cache
def source_digests() -> dict[str, str]:
    """Digests of the templates, the fragments among them, the CUDA headers and the generator.

    Raises: FileNotFoundError.
    """
    shipped = _shipped()
    each = {name: digest.encode() for name, digest in shipped.fragments.items()}
    return {
        "templates": shipped.templates,
        "fragments": digest_files(each),
        "headers": shipped.headers,
        "generator": _as_imported or _digest_generator(),
    }


def key_digests(problem: Problem) -> dict[str, Any]:
    """The digests that keys of the problem's kernels have: of fragments those of its own alone, so
    that another one, new or edited, leaves these kernels as they are; None of one that is missing.

    Raises: FileNotFoundError.
    """
    known = _shipped().fragments
    used = (f"{axis}/{name}.cuh.j2" for axis, name in problem.fragments)
    return {**source_digests(), "fragments": {file: known.get(file) for file in used}}


def have_changed(atoms: Collection[str] = ()) -> bool:
    """Whether templates, modules or these headers of CUTLASS's are others on the disk than when
    this process read them, so that what it compiles may not be what its keys say.

    Raises: FileNotFoundError.
    """
    if cutlass.have_changed(atoms):
        return True
    known = source_digests()
    if known["generator"] != _digest_generator():
        return True
    return files.shipped() is None and read_shipped() != _shipped()


def _digest_generator() -> str:
    return digest_files({name: read_module(name) for name in GENERATOR})


def _digest_as_imported() -> str | None:
    """The generator's digest now, while its modules are imported: an upgrade may come before the
    first key is asked for."""
    try:
        return _digest_generator()
    except FileNotFoundError:
        return None  # which a key says, too


_as_imported = _digest_as_imported()


def build_command(problem: Problem, arch: str) -> str:
    """A shell command that builds the problem's kernels as they stand: exact where the caller's
    spec is not known, as in a call from a model."""
    program = (
        "import sys; from attngen.compiler.builder import build_problem; "
        "from attngen.spec.problem import Problem; from attngen.io.values import from_json; "
        "build_problem(from_json(Problem, sys.argv[1]), sys.argv[2])"
    )
    return shlex.join(["python", "-c", program, to_json(problem), arch])
