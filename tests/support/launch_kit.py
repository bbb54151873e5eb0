"""The CPU passes for a device with kernels, whose launches start nothing: what is left of a call is
the host's part, to be counted and timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from attngen.compiler.builder import render_problem
from attngen.kernels.plan import plans
from attngen.kernels.selection import of_call
from attngen.runtime.load import LoadedKernel

MULTIPROCESSORS = 132
UNREAD = 1 << 40  # where results lie that nobody reads
FRONTEND = "attngen.frontends.pytorch"


def find_kernels(problem: Any, arch: str, kernel: str | None = None) -> tuple[Any, ...]:
    """Launch descriptions of a problem's kernels, as `builder.find_kernels` has them, without
    cubins."""
    chosen = of_call(plans(problem, arch), lambda plan: plan.family, kernel)
    entries = (render_problem(problem, each).kernel for each in chosen)
    return tuple((SimpleNamespace(kernel=entry), b"") for entry in entries)


def stand_ins(launch: Callable[..., Any]) -> dict[str, Any]:
    """Stand-ins for the device, by the names that they replace. launch: called with a prepared
    launch, addresses and a stream; these addresses pass for its parameters."""

    def started(prepared: Any, addresses: dict[str, int], stream: int) -> dict[str, int]:
        launch(prepared, addresses, stream)
        return addresses

    def empty(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype)

    operation = f"{FRONTEND}.operation"
    return {
        f"{FRONTEND}.routing.device_arch": lambda device: "sm_90a",
        f"{FRONTEND}.descriptions.device_arch": lambda device: "sm_90a",
        "attngen.call.kernel_choice.find_kernels": find_kernels,
        f"{operation}.launch": started,
        f"{operation}.relaunch": started,
        f"{operation}.tile_counter": lambda device, stream: 64,
        f"{operation}._empty_strided_cuda": empty,
        f"{FRONTEND}.forward.unread_memory": lambda device: UNREAD,
        f"{operation}.current_device": lambda: None,
        f"{operation}.current_stream": lambda index: 7,
        "attngen.call.kernel_choice.multiprocessors": lambda device: MULTIPROCESSORS,
        "attngen.runtime.load.current_device": lambda: None,
        "attngen.runtime.load.ensure_context": lambda device: None,
        "attngen.runtime.load.load": lambda binary, cubin, device: LoadedKernel(
            "handle", binary.kernel, 0, MULTIPROCESSORS
        ),
        "torch.cuda.device": contextlib.nullcontext,
        "torch.cuda.is_current_stream_capturing": lambda: False,
    }
