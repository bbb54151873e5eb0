"""Load: from a launch program and its cubin to a kernel that the driver can launch."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import LaunchError
from ..spec.problem import Problem
from ..targets.target import DEFAULT, TARGETS, Target
from .program import Binary, KernelEntry
from .program_check import mistakes_of
from .run_time import smem_bytes_of

_libraries: dict[str, Any] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device: what cuLaunchKernel takes, its launch description, the problem
    and architecture that it is for, and what that architecture has."""

    handle: Any
    kernel: KernelEntry
    device: int
    multiprocessors: int
    variant: tuple[Problem, str] | None = None
    target: Target = DEFAULT


@cache  # the import system takes half a microsecond to find what is imported
def driver() -> Any:
    """The driver bindings. Raises: LaunchError where cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise LaunchError(f"launching needs cuda-bindings: {error}") from error
    return bindings


def checked(what: str, result: tuple[Any, ...]) -> Any:
    """The driver call's value. Raises: LaunchError naming the call and the driver's error."""
    status = result[0]
    if status:
        raise LaunchError(f"{what}: {status.name}")
    return result[1] if len(result) == 2 else result[1:]


def current_device() -> int | None:
    """The device whose context is current in this thread; None where none is.

    The driver's answer: torch's names the device whose context it would make when it has to.
    """
    status, device = driver().cuCtxGetDevice()
    return None if status else int(device)


def ensure_context(device: int) -> None:
    """Make the device's primary context current in a thread that has none, or another's: torch
    does so only when it calls the runtime, which a cached allocation does not."""
    if current_device() != device:
        cuda = driver()
        handle = checked("cuDeviceGet", cuda.cuDeviceGet(device))
        context = checked("primary context", cuda.cuDevicePrimaryCtxRetain(handle))
        checked("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make the device's primary context current meanwhile, then that of the device before it."""
    before = current_device()
    ensure_context(device)
    try:
        yield
    finally:
        if before is not None:
            ensure_context(before)


def load(binary: Binary, cubin: bytes, device: int) -> LoadedKernel:
    """Load the cubin (once a process) and prepare its kernel on device `device`.

    The driver must be up, as it is once a tensor is on the device.
    Raises: LaunchError where the binary describes no launch, the cubin is not what it describes, or
    the device is of another architecture.
    """
    if mistakes := mistakes_of(binary):
        raise LaunchError([f"{binary.kernel.entry[:80]}: {each}" for each in mistakes])
    target = TARGETS.get(binary.arch)
    if target is None:
        known = ", ".join(TARGETS)
        raise LaunchError(f"{binary.kernel.entry} is for {binary.arch}; known: {known}")
    cuda = driver()
    handle = checked("cuDeviceGet", cuda.cuDeviceGet(device))
    axes = ("MAJOR", "MINOR")
    capability = tuple(_attribute(f"COMPUTE_CAPABILITY_{axis}", device) for axis in axes)
    if reason := _unfit(binary, target, (capability[0], capability[1]), device):
        raise LaunchError(f"{binary.kernel.entry} is for {binary.arch}{reason}")
    kernel = checked(
        f"cuLibraryGetKernel({binary.kernel.entry})",
        cuda.cuLibraryGetKernel(_library(binary, cubin), binary.kernel.entry.encode()),
    )
    ensure_context(device)  # which a thread of autograd may lack, and the driver's answer needs
    _check_parameters(binary.kernel, kernel)
    smem = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(
        f"shared memory of {binary.kernel.entry}",
        cuda.cuKernelSetAttribute(smem, smem_bytes_of(binary.kernel, 1, target), kernel, handle),
    )
    function = cuda.CUfunction(int(kernel))  # cuLaunchKernel takes a CUkernel cast to CUfunction
    variant, count = (binary.problem, binary.arch), multiprocessors(device)
    return LoadedKernel(function, binary.kernel, device, count, variant, target)


def _unfit(binary: Binary, target: Target, capability: tuple[int, int], device: int) -> str:
    """Why the device cannot run the kernel, as the end of a sentence; empty where it can."""
    if not target.runs_on(capability):
        return f" (compute capability {target.capability}); device {device} has {capability}"
    if capability != target.capability:
        room = _attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device)
        if binary.kernel.smem_bytes > room:
            asked = binary.kernel.smem_bytes
            return f" and asks for {asked} bytes of shared memory; device {device} has {room}"
    return ""


def _check_parameters(described: KernelEntry, kernel: Any) -> None:
    """Refuse a kernel whose parameters are not the one block that a launch hands over: the driver
    reads as much as the kernel says. Raises: LaunchError."""
    cuda, sizes = driver(), []
    for index in range(2):
        status, _, size = cuda.cuKernelGetParamInfo(kernel, index)
        if not status:
            sizes.append(int(size))
    if sizes != [described.params_bytes] * (described.params_bytes > 0):
        raise LaunchError(
            f"{described.entry}: its cubin takes parameters of {sizes} bytes, its description has "
            f"one of {described.params_bytes}"
        )


def multiprocessors(device: int) -> int:
    """Count a device's multiprocessors. Raises: LaunchError."""
    return _attribute("MULTIPROCESSOR_COUNT", device)


def _attribute(name: str, device: int) -> int:
    cuda = driver()
    handle = checked("cuDeviceGet", cuda.cuDeviceGet(device))
    code = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(checked(name, cuda.cuDeviceGetAttribute(code, handle)))


def _library(binary: Binary, cubin: bytes) -> Any:
    cuda = driver()
    with _lock:
        if binary.cubin_sha256 not in _libraries:
            if hashlib.sha256(cubin).hexdigest() != binary.cubin_sha256:
                raise LaunchError(f"{binary.kernel.entry}: the cubin is not the one described")
            _libraries[binary.cubin_sha256] = checked(
                f"cuLibraryLoadData({binary.kernel.entry})",
                cuda.cuLibraryLoadData(cubin, None, None, 0, None, None, 0),
            )
        return _libraries[binary.cubin_sha256]
