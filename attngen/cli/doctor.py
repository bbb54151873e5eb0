"""Doctor: what this machine has for building and running kernels, whatever is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import __version__
from ..compiler.toolchain import mapped_file
from ..errors import install_command
from ..io import files
from ..io.text import printable

Status = Literal["ok", "missing", "problem"]
TORCH_TIMEOUT_SECONDS = 120
_TORCH_PROBE = "import torch; print(torch.__version__, torch.version.cuda or 'CPU only')"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Finding:
    """One item: what was found, and what to do where that is not enough (`advice`)."""

    item: str
    status: Status
    detail: str
    advice: str = ""


class Missing(Exception):
    """Something is not there: `detail` says what, `advice` what to do."""

    def __init__(self, detail: str, advice: str) -> None:
        super().__init__(detail)
        self.advice = advice


def examine(items: Iterable[str] = ()) -> Iterator[Finding]:
    """These items in turn, or all; a check that fails in an unforeseen way is a finding too."""
    for item in items or CHECKS:
        try:
            yield Finding(item, "ok", CHECKS[item]())
        except Missing as absence:
            yield Finding(item, "missing", str(absence), absence.advice)
        except Exception as error:  # the doctor reports, whatever is broken
            yield Finding(item, "problem", f"{type(error).__name__}: {error}")


def format_finding(finding: Finding) -> str:
    """A line of the report, and the advice below it."""
    mark = {"ok": "ok", "missing": "--", "problem": "!!"}[finding.status]
    line = f"{mark}  {finding.item:<14} {printable(finding.detail)}"
    return line + (f"\n    {'':<14} → {finding.advice}" if finding.advice else "")


def check_python() -> str:
    """With its zlib, which decides the bytes of bundles."""
    return f"{platform.python_version()} at {sys.executable}, zlib {zlib.ZLIB_RUNTIME_VERSION}"


def check_attngen() -> str:
    """The package's version, and the place that it runs from."""
    return f"{__version__} at {Path(__file__).resolve().parents[1]}"


def check_torch() -> str:
    """torch's version, asked of another process: importing it takes seconds and memory."""
    done = subprocess.run(
        [sys.executable, "-c", _TORCH_PROBE],
        capture_output=True,
        text=True,
        timeout=TORCH_TIMEOUT_SECONDS,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise Missing(reason[0], "kernels build without it; pip install torch to run them")
    version, _, cuda = done.stdout.strip().partition(" ")
    return f"{version} (CUDA {cuda})" if cuda[:1].isdigit() else f"{version} ({cuda})"


def check_bindings() -> str:
    """The version of cuda-bindings, by which kernels are compiled and launched."""
    return _package("cuda-bindings", install_command())


def check_jinja2() -> str:
    """The version of Jinja, by which kernels are rendered."""
    return _package("jinja2", f"only building needs it: {install_command('compile')}")


def check_nvrtc() -> str:
    """The version of the NVRTC that is loaded, and the file it came from."""
    advice = f"only building needs it: {install_command('compile')}"
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings' loader has exceptions of its own
        raise Missing(" ".join(str(error).split())[:200], advice) from error
    if int(status) != 0:
        raise Missing(f"nvrtcVersion: {status.name}", advice)
    return f"{major}.{minor} at {mapped_file('libnvrtc.so') or 'an unknown place'}"


def check_cutlass() -> str:
    """The version of CUTLASS's headers, and the digest of those that kernels include."""
    from ..compiler import cutlass
    from ..compiler.digest import digest_files

    advice = f"only building for GPUs other than Hopper needs it: {install_command('compile')}"
    version = _package(cutlass.PACKAGE, advice)
    found = cutlass.atoms()
    if not found:
        raise Missing(f"{version}, without {', '.join(sorted(cutlass.ATOMS))}", advice)
    return f"{version}: {len(found)} headers, sha256 {digest_files(found)[:12]}"


def check_driver() -> str:
    """The CUDA version that the driver supports; nothing is initialised."""
    version = ctypes.c_int()
    _call(_libcuda(), "cuDriverGetVersion", ctypes.byref(version))
    where = mapped_file("libcuda.so") or "libcuda.so.1"
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10} at {where}"


def check_gpus() -> str:
    """Name and compute capability of each device."""
    cuda, count = _libcuda(), ctypes.c_int()
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise Missing("the driver sees none", "kernels build here; run them where one is")
    return ", ".join(_describe_gpu(cuda, ordinal) for ordinal in range(count.value))


def check_headers() -> str:
    """How many headers kernels may include, and their digest."""
    from ..compiler.digest import source_digests

    if files.shipped() and not files.headers():
        return _removed("headers")
    count = len(files.headers())
    if not count:
        raise Missing(f"none in {files.include_dir()}", f"reinstall it: {install_command()}")
    return f"{count} files, sha256 {source_digests()['headers'][:12]}, in {files.include_dir()}"


def check_templates() -> str:
    """The digest of the templates, and the place that they are read from."""
    from ..compiler.digest import source_digests

    try:
        folder = files.templates_dir()
    except FileNotFoundError as error:
        if files.shipped():
            return _removed("templates")
        raise Missing(str(error), install_command()) from error
    return f"sha256 {source_digests()['templates'][:12]}, in {folder}"


def _removed(what: str) -> str:
    """Say that a part was removed that servers may lack (docs/guide/shipping.md)."""
    return f"removed: no {what}, which bundles and cached kernels do without; nothing compiles here"


def check_tuned() -> str:
    """Which measured plans go before the heuristics' choice."""
    from ..errors import PlanError
    from ..kernels import tuned
    from ..targets.target import names

    try:
        found = {path: tuned.read(path) for path in map(tuned.file_of, names()) if path}
    except PlanError as error:
        advice = f"no forward builds so: unset {tuned.CHIP_VARIABLE}, or run attngen tune"
        raise Missing(str(error), advice) from error
    if not found:
        return "none: the heuristics decide"
    return ", ".join(f"{path} (problems: {len(each.entries)})" for path, each in found.items())


def check_cache() -> str:
    """Where binaries are kept, whether they can be, and how many there are."""
    from ..compiler.cache import Cache

    store = Cache.default()
    if reason := store.distrust():
        raise Missing(reason, "until then kernels are compiled again in each process")
    if not files.can_write_into(store.root):
        advice = "kernels are compiled again in each process; set ATTNGEN_CACHE_DIR"
        raise Missing(f"{store.root} is not writable", advice)
    entries = store.entries() if store.root.is_dir() else []
    kilobytes = sum(entry.bytes for entry in entries) / 1000
    return f"{store.root}, kernels: {len(entries)}, {kilobytes:.0f} kB"


def check_bundles() -> str:
    """Which bundles calls look into before the cache, and which of their kernels others hide."""
    from ..ship import lookup as mounts

    found = mounts.mounted()
    shadowed = mounts.find_shadowed(found)
    if differing := [each for each in shadowed if each.differing]:
        first = differing[0]
        raise Missing(
            f"variants that a bundle before theirs has otherwise: {len(differing)}, those of "
            f"{first.shadowed} behind {first.used}",
            f"take one of them out of {mounts.VARIABLE}, or out of the installed packages",
        )
    if not found:
        return f"none mounted; {mounts.VARIABLE} or a package's entry point names them"
    return ", ".join(f"{bundle.path} (variants: {len(bundle.problems)})" for bundle in found)


def check_jit() -> str:
    """Whether a kernel that is neither in a bundle nor in the cache is compiled."""
    disabled = os.environ.get("ATTNGEN_DISABLE_JIT", "") not in ("", "0")
    return "off: ATTNGEN_DISABLE_JIT is set" if disabled else "on: missing kernels are compiled"


CHECKS: dict[str, Callable[[], str]] = {
    "python": check_python,
    "attngen": check_attngen,
    "torch": check_torch,
    "cuda-bindings": check_bindings,
    "jinja2": check_jinja2,
    "nvrtc": check_nvrtc,
    "cutlass": check_cutlass,
    "driver": check_driver,
    "gpu": check_gpus,
    "headers": check_headers,
    "templates": check_templates,
    "tuned": check_tuned,
    "bundles": check_bundles,
    "cache": check_cache,
    "jit": check_jit,
}


def _package(name: str, advice: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise Missing("not installed", advice) from error


def _libcuda() -> ctypes.CDLL:
    """The driver's library, loaded but not initialised."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Missing(
            str(error), "kernels build without it; running them needs NVIDIA's driver 580 or later"
        ) from error


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    status = getattr(cuda, function)(*arguments)
    if status:
        advice = "see nvidia-smi; inside a container, check that it was given the GPU"
        raise Missing(f"{function} failed: CUresult {status}", advice)


def _describe_gpu(cuda: ctypes.CDLL, ordinal: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, device)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, device)
    capability = major.value, minor.value
    return f"{name.value.decode(errors='replace')} ({_kernels_of(capability)})"


def _kernels_of(capability: tuple[int, int]) -> str:
    """Which kernels devices of a compute capability run."""
    from ..errors import SpecError
    from ..targets.target import NAMED, VARIABLE, of_capability

    own = f"sm_{capability[0]}{capability[1]}"
    try:
        target = of_capability(capability)
    except SpecError as error:
        raise Missing(str(error), f"unset {VARIABLE}") from error
    if target is None:
        return f"{own}, no kernels"
    usual = target.capability == capability and not NAMED
    return own if usual else f"{own}, kernels of {target.name}"
