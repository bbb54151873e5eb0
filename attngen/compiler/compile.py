"""Compile: from CUDA source to a cubin with NVRTC, with no driver, no nvcc and no include path.

Kernels that would be slow or wrong do not leave this module: a serialised wgmma and an ignored
setmaxnreg are errors. A spill is a warning.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CompileError, CompilerMissing
from ..io.files import headers
from ..runtime.program import SCHEMA_VERSION, Binary, Resources
from ..spec.problem import Problem
from . import cutlass
from .toolchain import installed_toolchain, note_loaded

if TYPE_CHECKING:
    from ..kernels.fill import Source

log = logging.getLogger("attngen")

# -minimal: without what no kernel uses (textures, the runtime); the same cubins in 6 % less time.
# --no-cache: beside a driver NVRTC has a cache of its own, which keeps no log.
OPTIONS = (
    *("-std=c++17", "-minimal", "--no-cache"),
    *("--ptxas-options=-v", "--ptxas-options=--warn-on-spills"),
)
# ptxas: setmaxnreg ignored (C7504, C7508), wgmma serialised for one of several reasons (C7510 to
# C7519, all with this phrase).
FATAL_ADVISORIES = ("C7504", "C7508", "Potential Performance Loss")
HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True)
class Compiled:
    """A cubin, the compiler's log, and how long it took (seconds, wall)."""

    cubin: bytes
    log: str
    seconds: float


def compile_source(source: Source, problem: Problem, arch: str) -> tuple[Binary, bytes]:
    """The launch program and its cubin.

    Raises: CompileError with the compiler's log, or with why the kernel must not ship.
    """
    done = run_nvrtc(source.text, f"{source.kernel.entry}.cu", arch)
    resources = read_resources(done.log, len(done.cubin))
    if defects := find_defects(done.log):
        raise CompileError([f"{source.kernel.entry}: {defect}" for defect in defects])
    if resources.in_local_memory:
        log.warning("%s: %s; right, but slower than it could be",
                    source.kernel.entry, resources.in_local_memory)  # fmt: skip
    binary = Binary(
        schema=SCHEMA_VERSION,
        arch=arch,
        problem=problem,
        kernel=source.kernel,
        resources=resources,
        toolchain=toolchain(),
        source_sha256=source.sha256,
        cubin_sha256=hashlib.sha256(done.cubin).hexdigest(),
    )
    return binary, done.cubin


def toolchain() -> str:
    """The compiler's name and version, `nvrtc 13.0`; part of every cache key."""
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return f"nvrtc {major}.{minor}"


def run_nvrtc(text: str, name: str, arch: str) -> Compiled:
    """Compile `text` with attngen's headers handed over in memory.

    Raises: CompileError with the log; CompilerMissing, also without CUTLASS where it is included.
    """
    nvrtc = _nvrtc()
    known = {**headers(), **cutlass.supply(text)}
    names = [header.encode() for header in known]
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            text.encode(), name.encode(), len(known), list(known.values()), names
        ),
    )
    options = [option.encode() for option in (*OPTIONS, f"-arch={arch}")]
    log.info("compiling %s", name)
    start = time.perf_counter()
    with _Heartbeat(name):
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    seconds = time.perf_counter() - start
    # Not bytes: Python has each of a single character once, and the bindings write into it.
    message = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, message))
    report = message.rstrip(b"\0 ").decode(errors="replace")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        nvrtc.nvrtcDestroyProgram(program)
        raise CompileError(f"{name}: {status.name}\n{report}")
    cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    log.info("compiled %s in %.2f s", name, seconds)
    return Compiled(bytes(cubin), report, seconds)


def read_resources(report: str, cubin_bytes: int) -> Resources:
    """ptxas's figures out of NVRTC's log."""

    def figure(pattern: str) -> int:
        return max((int(value) for value in re.findall(pattern, report)), default=0)

    return Resources(
        registers=figure(r"Used (\d+) registers"),
        spill_bytes=figure(r"(\d+) bytes spill stores"),
        stack_bytes=figure(r"(\d+) bytes stack frame"),
        cubin_bytes=cubin_bytes,
    )


def find_defects(report: str) -> list[str]:
    """Why the kernel must not ship: each advisory of ptxas that means a far slower kernel."""
    return [
        line.strip()
        for line in report.splitlines()
        if any(advisory in line for advisory in FATAL_ADVISORIES)
    ]


class _Heartbeat:
    """Logs that a compile is still running every ten seconds, until left."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._timer: threading.Timer | None = None
        self._ended = False
        self._start = time.perf_counter()

    def __enter__(self) -> None:
        self._schedule()

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._ended:  # a beat may be under way when the compile ends
            return
        self._timer = threading.Timer(HEARTBEAT_SECONDS, self._beat)
        self._timer.daemon = True
        self._timer.start()

    def _beat(self) -> None:
        if self._ended:
            return
        log.info("still compiling %s, %.0f s", self._name, time.perf_counter() - self._start)
        self._schedule()


@functools.cache
def _nvrtc() -> Any:
    """The bindings, whose library has been found."""
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import DynamicLibNotFoundError
    except ImportError as error:
        raise CompilerMissing("NVRTC") from error
    try:
        _, *version = nvrtc.nvrtcVersion()  # the bindings look for the library in the first call
    except DynamicLibNotFoundError as error:
        raise CompilerMissing("NVRTC") from error
    except RuntimeError as error:  # it is there, but cannot be loaded, or is another library
        raise CompilerMissing("NVRTC", f"does not load ({error})") from error
    note_loaded(*version)
    return nvrtc


def load_toolchain() -> str | None:
    """The version of the compiler that kernels are compiled with, which is loaded for that.

    Raises: CompilerMissing.
    """
    _nvrtc()
    return installed_toolchain()


def _checked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
