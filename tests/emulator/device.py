"""A device on the host, which launches kernels on tensors of the CPU.

`emulated()` puts it where attngen looks for a GPU, so that `attention(…, backend="cuda")` on CPU
tensors runs the rendered kernels with everything around them: plans, launches, tensor maps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from cuda.bindings import driver as bindings

from attngen.call import kernel_choice
from attngen.compiler import builder
from attngen.frontends.pytorch import (
    append,
    backward,
    forward,
    forward_onto,
    fp8_backward,
    operation,
)
from attngen.frontends.pytorch.callables import bits as callable_bits
from attngen.frontends.pytorch.callables import operator as callable_operator
from attngen.kernels import plan, selection
from attngen.kernels.base import KernelPlan
from attngen.runtime import counters, load
from attngen.runtime.program import SCHEMA_VERSION, Binary, Resources
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT, NAMED

from ..support.caches import BACKWARD, FORWARD, held
from .compiler import HostCompiler

ARCH = NAMED or DEFAULT.name
MULTIPROCESSORS = 5  # of which each runs a CTA at a time
TIMINGS = ("early", "late", "random")  # when copies and products are done
ALIGNMENT = 256
MAP_BYTES = 128
MESSAGE_BYTES = 4096


class Kernel(NamedTuple):
    """`lets_start`: whether the next one may start before it has ended."""

    library: ctypes.CDLL
    params_bytes: int
    lets_start: bool


def _aligned(memory: Any) -> int:
    """The first place in it that is."""
    return -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT


class Emulator:
    """Kernels, compiled into `folder`, and launches of them, each of a seed of its own."""

    def __init__(self, folder: Path, timing: str = "random") -> None:
        self.timing = timing
        self.launches = 0
        self._compiler = HostCompiler(folder)
        self._kernels: list[Kernel] = []
        self._memory: list[Any] = []
        self._stream = threading.RLock()  # on which launches follow each other
        self._lets_start: set[bytes] = set()  # libraries of such kernels
        self._waiting: Callable[[], None] | None = None  # a launch of one

    # ---- what attngen asks of the driver; types and constants are its own
    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        memory = ctypes.create_string_buffer(size + ALIGNMENT)
        self._memory.append(memory)
        return 0, _aligned(memory)

    def cuMemsetD32(self, address: int, value: int, count: int) -> tuple[int]:
        ctypes.memmove(address, struct.pack("<I", value) * count, 4 * count)
        return (0,)

    def cuMemsetD32Async(self, address: int, value: int, count: int, _: int) -> tuple[int]:
        """In the order of launches."""
        with self._stream:
            self.finish()
            return self.cuMemsetD32(address, value, count)

    def cuCtxSynchronize(self) -> tuple[int]:
        return (0,)

    def cuStreamIsCapturing(self, _: int) -> tuple[int, int]:
        return 0, 0

    def cuStreamGetId(self, stream: int) -> tuple[int, int]:
        return 0, stream

    def cuTensorMapEncodeTiled(
        self, dtype: Any, rank: int, address: int, sizes: Any, strides: Any, box: Any, *_: Any
    ) -> tuple[Any, Any]:
        """A map as copies.cpp reads it, refused where the driver would."""
        sizes, strides, box = ([int(x) for x in part] for part in (sizes, strides, box))
        legal = (
            address % 16 == 0
            and all(1 <= size <= 1 << 32 for size in sizes)
            and all(stride % 16 == 0 and stride < 1 << 40 for stride in strides)
            and all(1 <= size <= 256 for size in box)
        )
        if not legal:
            return bindings.CUresult.CUDA_ERROR_INVALID_VALUE, None
        element_bytes = 1 if dtype.name.endswith("UINT8") else 2
        absent = [0] * (5 - rank)
        dimensions = (*sizes, *absent, *strides, *absent, *box, *absent)
        kinds = rank, element_bytes, dtype.name.endswith("BFLOAT16")
        packed = struct.pack("<Q5Q4Q5IBBB", address, *dimensions, *kinds)
        memory = ctypes.create_string_buffer(packed, MAP_BYTES)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(memory))

    def cuLaunchKernel(
        self, handle: int, x: int, y: int, z: int, threads: int, _y: int, _z: int, *rest: Any
    ) -> tuple[int]:
        shared_bytes, _, parameters, _ = rest
        self._launch(handle, (x, y, z), threads, shared_bytes, parameters, early=False)
        return (0,)

    def cuLaunchKernelEx(self, config: Any, handle: int, parameters: int, _: int) -> tuple[int]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        kind = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early = kind in (each.id for each in config.attrs)
        threads, shared_bytes = config.blockDimX, config.sharedMemBytes
        self._launch(handle, grid, threads, shared_bytes, parameters, early=early)
        return (0,)

    # ---- kernels
    def _launch(
        self, handle: int, grid: tuple[int, ...], threads: int, shared_bytes: int, parameters: int,
        *, early: bool,
    ) -> None:  # fmt: skip
        """At once, unless the next one may start before this one has ended: so with a copy of what
        its parameters are now. early: it may do so itself."""
        kernel = self._kernels[handle]
        copy = ctypes.create_string_buffer(kernel.params_bytes + ALIGNMENT)
        first = ctypes.c_void_p.from_address(parameters).value
        ctypes.memmove(_aligned(copy), first, kernel.params_bytes)
        with self._stream:
            if not early:
                self.finish()
            run = functools.partial(self._run, kernel, grid, threads, shared_bytes, copy)
            self._waiting = functools.partial(run, before=self._waiting)
            if not kernel.lets_start:
                self.finish()

    def finish(self) -> None:
        """Wait until all launches have ended. Raises: AssertionError naming a kernel's mistake."""
        with self._stream:
            waiting, self._waiting = self._waiting, None
            if waiting:
                waiting()

    def _run(
        self, kernel: Kernel, grid: tuple[int, ...], threads: int, shared_bytes: int,
        parameters: Any, before: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """One launch, to its end; and what it starts before the end of."""
        library = kernel.library
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        errors: list[AssertionError] = []

        @ctypes.CFUNCTYPE(ctypes.c_int)
        def run_before() -> int:
            try:
                assert before is not None
                before()
            except AssertionError as error:
                errors.append(error)
            return len(errors)

        self.launches += 1
        failed = library.emulator_run(
            library.emulator_entry, ctypes.c_void_p(_aligned(parameters)),
            (ctypes.c_uint * 3)(*grid), threads, shared_bytes, MULTIPROCESSORS,
            TIMINGS.index(self.timing), ctypes.c_ulonglong(self.launches),
            run_before if before else None, message, MESSAGE_BYTES,
        )  # fmt: skip
        if errors:
            raise errors[0]
        assert not failed, message.value.decode()

    def find_kernels(
        self, problem: Problem, arch: str, kernel: str | None = None
    ) -> tuple[tuple[Binary, bytes], ...]:
        """Stand in for `builder.find_kernels`; the path of a library stands for a cubin."""
        all_plans = plan.plans(problem, arch)
        wanted = selection.of_call(all_plans, lambda each: each.family, kernel)
        return tuple(self.build(problem, each, arch) for each in wanted)

    def build(
        self, problem: Problem, chosen: KernelPlan, arch: str, templates: Path | None = None
    ) -> tuple[Binary, bytes]:
        """One kernel, of these templates or the shipped ones."""
        source = builder.render_problem(problem, chosen, templates)
        binary = Binary(
            SCHEMA_VERSION, arch, problem, source.kernel, Resources(0, 0, 0, 0), "g++",
            source.sha256, "",
        )  # fmt: skip
        library = bytes(self._compiler.compile(source.text))
        if "allow_dependents();" in source.text:
            self._lets_start.add(library)
        return binary, library

    def load(self, binary: Binary, library: bytes, device: Any) -> load.LoadedKernel:
        """Stand in for `load.load`."""
        size, lets_start = binary.kernel.params_bytes, library in self._lets_start
        self._kernels.append(Kernel(ctypes.CDLL(library.decode()), size, lets_start))
        handle, variant = len(self._kernels) - 1, (binary.problem, binary.arch)
        return load.LoadedKernel(handle, binary.kernel, device, MULTIPROCESSORS, variant)


def _allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty_strided(sizes, strides, dtype=dtype)
    tensor.untyped_storage().fill_(0xFF)  # NaN in every floating dtype
    return tensor


OPERATIONS: tuple[Callable[..., Any], ...] = (
    *(forward.forward, forward_onto.forward_onto, append.append),
    *(backward.backward, fp8_backward.fp8_backward, callable_operator.mask_of_function),
)


@contextlib.contextmanager
def emulated(emulator: Emulator) -> Iterator[None]:
    """CPU tensors have the kernels of ARCH, all of which have ended in the end."""
    start = operation.start

    def start_and_finish(*arguments: Any) -> torch.Tensor | None:
        workspace = start(*arguments)
        emulator.finish()  # nobody else would wait for the last one
        return workspace

    stand_ins = {
        "attngen.compiler.builder.find_kernels": emulator.find_kernels,
        "attngen.runtime.counters.driver": lambda: emulator,
        "attngen.runtime.launch.driver": lambda: emulator,
        "attngen.runtime.load.current_device": lambda: None,
        "attngen.runtime.load.ensure_context": lambda _: None,
        "attngen.runtime.load.load": emulator.load,
        "attngen.runtime.load.multiprocessors": lambda _: MULTIPROCESSORS,
        "attngen.frontends.pytorch.routing.device_arch": lambda _: ARCH,
        "attngen.frontends.pytorch.operation._empty_strided_cuda": _allocate,
        "attngen.frontends.pytorch.descriptions.device_arch": lambda _: ARCH,
        "attngen.call.kernel_choice.find_kernels": emulator.find_kernels,
        "attngen.frontends.pytorch.backward.start": start_and_finish,
        "attngen.frontends.pytorch.operation.start": start_and_finish,
        "attngen.frontends.pytorch.backward_parts.start": start_and_finish,
        "attngen.frontends.pytorch.append.device_arch": lambda _: ARCH,
        "attngen.frontends.pytorch.narrow.start": start_and_finish,
        "attngen.frontends.pytorch.narrow.device_arch": lambda _: ARCH,
        "attngen.frontends.pytorch.narrow.is_current": lambda _: True,
        "attngen.frontends.pytorch.gradient_casts.start": start_and_finish,
        "attngen.frontends.pytorch.gradient_casts.is_current": lambda _: True,
        "attngen.call.kernel_choice.multiprocessors": lambda _: MULTIPROCESSORS,
        "attngen.frontends.pytorch.operation.current_stream": lambda _: 0,
        "attngen.frontends.pytorch.operation.current_device": lambda: None,
        "attngen.frontends.pytorch.operation.is_capturing": lambda: False,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.current_stream": lambda: SimpleNamespace(cuda_stream=0),
        "torch.cuda.device": contextlib.nullcontext,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.synchronize": lambda: None,
    }
    remembered = (
        *held(*FORWARD, *BACKWARD, append.prepared_appends, append.checked_appends),
        *held(callable_bits.prepared_masks),
        kernel_choice._kernels,
        *(counters._addresses, counters._free, counters._unread),
    )
    library = torch.library.Library("attngen", "IMPL")
    for own in OPERATIONS:
        library.impl(own.__name__, own, "CPU")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for name, stand_in in stand_ins.items():  # torch._C of a CPU build lacks some of them
            stack.enter_context(mock.patch(name, stand_in, create=name.startswith("torch._C.")))
        for known in remembered:
            stack.enter_context(mock.patch.dict(known, clear=True))
        yield
        emulator.finish()
