"""JAX's programs for the CPU run kernels, on the device that the host stands for.

The handler is that of CUDA, registered for XLA's CPU: frames, addresses and scratch are XLA's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from attngen.frontends.jax import handler, operation

from .device import MULTIPROCESSORS, Emulator

HANDLER = "attngen.frontends.jax.handler"


@contextlib.contextmanager
def emulated_jax(emulator: Emulator) -> Iterator[None]:
    """Programs for the CPU that are compiled from here on launch kernels of `emulator`, which is in
    use already. A process keeps them: nothing else may compile such programs in it."""
    start = handler.start

    def start_and_finish(*arguments: object) -> None:
        start(*arguments)  # type: ignore[arg-type]
        emulator.finish()

    stand_ins = {
        f"{HANDLER}.start": start_and_finish,
        f"{HANDLER}.driver": lambda: emulator,
        f"{HANDLER}.ffi.stream_of": lambda words: 0,
        "attngen.frontends.jax.operation.TYPICAL_MULTIPROCESSORS": MULTIPROCESSORS,
    }
    operation.register("cpu")
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch(name, stand_in))
        stack.enter_context(mock.patch.dict(handler._sites, clear=True))
        yield
