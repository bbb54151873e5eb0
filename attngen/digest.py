"""Digest: the key under which a compiled kernel is cached, found without any compiler.

A key holds everything that decides the bytes of a cubin and its launch program, and nothing else:
no path, no time stamp, no tensor, no length. The compiler's version stands beside the digest, so
that a machine without a compiler can use what any compiler built.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import files
from .compile import OPTIONS
from .plan import KernelPlan
from .problem import Problem
from .program import SCHEMA_VERSION
from .values import to_data, to_json

# The modules that turn a problem and its plan into a cubin and a launch program. They belong to
# the key as the templates do: a changed parameter layout must not find the old kernel.
GENERATOR = (
    *("compile.py", "features.py", "program.py"),
    *("render.py", "render_bwd.py", "render_decode.py", "render_mask.py", "render_varlen.py"),
)
BINDINGS = "cuda-bindings"
NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class CacheKey:
    """What a cached kernel answers to.

    digest: sha256 of `material`, hex. toolchain: version of the NVRTC installed here (`13.0.88`),
    None where there is none. material: the key in full, canonical JSON. label: the kernel's name
    without its digest. command: a shell command, free of paths, that builds the kernel.
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
    material = to_json(
        {
            "schema": SCHEMA_VERSION,
            "arch": arch,
            "problem": to_data(problem),
            "plan": to_data(plan),
            "flags": list(OPTIONS),
            **source_digests(),
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


@cache
def source_digests() -> dict[str, str]:
    """Digests of the templates, the CUDA headers and the generator; read once a process.

    Where templates or headers were removed, those of the wheel that brought them.
    """
    generator = {name: (_PACKAGE / name).read_bytes() for name in GENERATOR}
    said = files.shipped()
    if said is None:
        said = {
            "templates": digest_files(read_tree(files.templates_dir())),
            "headers": digest_files(files.headers()),
        }
    return {
        "templates": said["templates"],
        "headers": said["headers"],
        "generator": digest_files(generator),
    }


@cache
def installed_toolchain() -> str | None:
    """The version of the installed NVRTC, from its package's metadata; None where there is none.

    Where several are installed (PyTorch brings its own), the first that fits the bindings' major
    version, since that is the one they load.
    """
    versions = [v for name in NVRTC_PACKAGES if (v := _version(name)) is not None]
    major = (_version(BINDINGS) or "").partition(".")[0]
    fitting = [v for v in versions if v.partition(".")[0] == major]
    return next(iter(fitting or versions), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_command(problem: Problem, arch: str) -> str:
    """A shell command that builds the problem's kernels as they stand: exact where the caller's
    spec is not known, as in a call from a model."""
    program = (
        "import sys; from attngen.builder import build_problem; "
        "from attngen.problem import Problem; from attngen.values import from_json; "
        "build_problem(from_json(Problem, sys.argv[1]), sys.argv[2])"
    )
    return shlex.join(["python", "-c", program, to_json(problem), arch])
