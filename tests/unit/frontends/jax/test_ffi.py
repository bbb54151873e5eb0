"""Frames of XLA's calls, read without a compiler."""

from __future__ import annotations

import _thread
import ctypes
import signal
from collections.abc import Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen import LaunchError, SpecError  # noqa: E402
from attngen.call.kernel_choice import Device  # noqa: E402
from attngen.call.numbers import Arguments  # noqa: E402
from attngen.call.table import WantedGradients  # noqa: E402
from attngen.call.tensors import TensorDesc  # noqa: E402
from attngen.frontends.jax import ffi, handler  # noqa: E402
from attngen.frontends.jax.program import COUNTER_BYTES, Program, ordered, scratch_of  # noqa: E402
from tests.support import launch_kit  # noqa: E402

jnp = jax.numpy
seen: list[Any] = []


def instantiate(words: ffi.Words) -> None:
    seen.append(ffi.text_of(words))


def execute(words: ffi.Words) -> None:
    text = ffi.text_of(words)
    if text == b"refuse":
        raise SpecError(["one reason", "another"])
    if text == b"leave":
        raise KeyboardInterrupt
    if text == b"stream":
        ffi.stream_of(words)
    source, target = ffi.addresses_of(words)
    seen.append(ffi.device_of(words))
    ctypes.memmove(target, source, 12)


ffi.register("attngen_test", "cpu", {"instantiate": instantiate, "execute": execute})


def call(text: str) -> Any:
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    program = jax.jit(lambda x: jax.ffi.ffi_call("attngen_test", shape)(x, program=text))
    return program(jnp.asarray([1.0, 2.0, 3.0])).block_until_ready()


def test_handler_reads_operands_results_text_and_device() -> None:
    seen.clear()
    assert call("text with ünicode").tolist() == [1, 2, 3]
    assert seen == ["text with ünicode".encode(), 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("refuse", "INVALID_ARGUMENT.*SpecError: one reason\nanother"),
        ("leave", "INTERNAL.*KeyboardInterrupt"),
        ("stream", "RuntimeError"),  # the CPU has none
    ],
)
def test_exceptions_are_errors_of_the_program(text: str, says: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        call(text)
    assert call("fine").tolist() == [1, 2, 3]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, which processes in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_that_waits_for_the_handler_is_an_error(interruptible: None) -> None:
    """XLA frees what a handler returns as an error: it has to be one, or none."""
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    program = jax.jit(lambda x: jax.ffi.ffi_call("attngen_test", shape)(x, program="waits"))
    x = jnp.asarray([1.0, 2.0, 3.0])
    for _ in range(3):  # from C alone, and on this thread
        assert program(x).tolist() == [1, 2, 3]
    calls = [_thread.interrupt_main, partial(program, x)]
    with pytest.raises(BaseException, match="INTERNAL: KeyboardInterrupt"):
        [*map(methodcaller("__call__"), calls)]  # no instruction of Python's between them
    assert program(x).tolist() == [1, 2, 3]


DENSE = TensorDesc.contiguous((2, 300, 4, 64), "bfloat16")
ROWS = TensorDesc.contiguous((2, 4, 300), "float32")
FORWARD = Program((("q", DENSE), ("k", DENSE), ("v", DENSE)), Arguments(), None, True, "sm_90a")
BACKWARD = Program(
    tuple((x, ROWS if x == "lse" else DENSE) for x in ordered(["d_o", "o", "lse", *"qkv"])),
    Arguments(mask="causal", softmax_scale=0.1, deterministic=True),
    WantedGradients(dsink=False, dbias=False),
    False,
    "sm_90a",
    1024,
)


@pytest.mark.parametrize("program", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_program_is_what_its_text_says(program: Program) -> None:
    assert Program.parse(program.text.encode()) == program
    assert " " not in program.text and program.text.isascii()


@pytest.mark.parametrize("text", [b"", b"{}", b'{"arguments":{"no":1},"operands":[]}', b"[1]"])
def test_text_of_something_else_is_refused(text: bytes) -> None:
    with pytest.raises(LaunchError, match="no program of this version"):
        Program.parse(text)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses of launches, on a device that starts nothing."""
    found: list[Any] = []

    class Driver:
        capturing = 0

        def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
            return 0, self.capturing

        def cuMemsetD32Async(self, address: int, word: int, count: int, stream: int) -> tuple[int]:
            found.append((address, word, count, stream))
            return (0,)

    driver = Driver()
    monkeypatch.setattr(handler, "driver", lambda: driver)
    monkeypatch.setattr(handler, "_sites", {})
    monkeypatch.setattr(handler.counters, "address", lambda device, stream, lasts: 48)
    monkeypatch.setattr(handler, "launch", lambda each, named, stream: found.append(named))
    monkeypatch.setattr(handler, "relaunch", lambda each, parameters, stream: found.append("again"))
    for name, stand_in in launch_kit.stand_ins(lambda *_: None).items():
        if name.startswith(("attngen.call", "attngen.runtime")):
            monkeypatch.setattr(name, stand_in)
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})
    found.append(driver)
    return found


def made(program: Program) -> tuple[bytes, int]:
    """The text of a program with its scratch, and how many addresses a call of it has."""
    planned = program.prepared(Device("planned", -1, "sm_90a", planned=launch_kit.MULTIPROCESSORS))
    scratch = scratch_of(planned)
    whole = Program(*[*vars(program).values()][:-1], scratch)
    return whole.text.encode(), len(program.operands) + len(planned.outputs) + (scratch > 0)


def test_calls_again_at_the_same_addresses_start_at_once(launched: list[Any]) -> None:
    driver = launched.pop()
    text, count = made(FORWARD)
    site = handler.find_site(text, 0)
    addresses = [4096 * (n + 1) for n in range(count)]
    handler.start(site, [*addresses], 0, 7)
    (named,) = launched
    assert named["q"] == 4096 and named["tile_counter"] == 48
    handler.start(site, [*addresses], 0, 7)
    assert launched.pop() == "again"
    driver.capturing = 1
    handler.start(site, [*addresses], 0, 7)
    *_, cleared, named = launched
    *_, scratch = addresses
    assert cleared == (scratch, 0, 1, 7) and named["tile_counter"] == scratch
    with pytest.raises(SpecError, match="multiple of 16 bytes"):
        handler.start(site, [8, *addresses[1:]], 0, 7)


def test_gradients_have_a_workspace_behind_the_counter(launched: list[Any]) -> None:
    launched.pop()
    text, count = made(BACKWARD)
    site = handler.find_site(text, 0)
    handler.start(site, [4096 * (n + 1) for n in range(count)], 0, 7)
    named = next(x for x in launched if isinstance(x, dict))
    assert named["workspace"] == 4096 * count + COUNTER_BYTES and named["dlse"] == 0
    assert named["d"] - named["workspace"] == site.prepared.offsets["d"]
    other = Program.parse(text)
    wrong = Program(*[*vars(other).values()][:-1], other.scratch + COUNTER_BYTES)
    with pytest.raises(LaunchError, match="Trace it where and as it runs"):
        handler.find_site(wrong.text.encode(), 0)


def test_words_of_numbers_are_those_of_float32() -> None:
    for number in (0.0, -np.inf, 1.5):
        assert handler._word(number) == np.float32(number).view(np.uint32)
