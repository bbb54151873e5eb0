"""Signals that wait while C calls a function: `map` calls C only, so they are noticed inside."""

from __future__ import annotations

import _thread
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import pytest

pytest.importorskip("jax")

from attngen.frontends.jax.callback import Callback  # noqa: E402

POINTER = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)
INTERRUPTED, OTHERWISE = 77, 1000
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def all_in_c(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls one after another, with no instruction of Python's between them."""
    return [*map(methodcaller("__call__"), calls)]


def interrupt(number: int = signal.SIGINT) -> Callable[[], None]:
    return partial(_thread.interrupt_main, number)


def made(function: Callable[[int], int]) -> tuple[Callback, Any]:
    """A callback that is guarded, and the address that C calls, as a function of ctypes'."""
    callback = Callback(lambda address: OTHERWISE + address)
    callback.guard(function, INTERRUPTED)
    return callback, POINTER(callback)


@pytest.fixture(autouse=True)
def nothing_leaves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where ctypes was left without a result."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    yield
    assert not found


@pytest.fixture
def raising() -> Iterator[None]:
    """Both signals raise."""

    def leave(number: int, _: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit

    before = [signal.signal(each, leave) for each in SIGNALS]
    yield
    for each, handler in zip(SIGNALS, before, strict=True):
        signal.signal(each, handler)


def test_signal_before_the_first_instruction_has_a_result(raising: None) -> None:
    seen: list[int] = []
    callback, pointer = made(lambda address: seen.append(address) or address + 1)
    assert [pointer(address) for address in range(3)] == [1, 2, 3]
    *_, found = all_in_c(interrupt(), partial(pointer, 5))
    assert found == INTERRUPTED and seen == [0, 1, 2] and not callback.is_guarded
    assert pointer(5) == OTHERWISE + 5
    callback.guard(lambda address: address, INTERRUPTED)
    assert pointer(5) == 5


def test_second_signal_waits_for_who_called(raising: None) -> None:
    _, pointer = made(lambda address: address)
    results: list[int] = []
    keep = results.extend
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        keep(map(methodcaller("__call__"), (*map(interrupt, SIGNALS), partial(pointer, 5))))
    assert results[-1] == INTERRUPTED


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, RecursionError, ValueError])
def test_what_a_function_raises_has_a_result(raised: type[BaseException]) -> None:
    def refuse(address: int) -> int:
        raise raised

    _, pointer = made(refuse)
    assert [pointer(5), pointer(5)] == [INTERRUPTED, OTHERWISE + 5]


def test_calls_within_a_call_and_of_other_threads_have_their_own() -> None:
    def answer(address: int) -> int:
        if address == 0:
            return pointer(1) + 1
        if address == 2:
            worker = threading.Thread(target=lambda: others.append(pointer(3)))
            worker.start()
            worker.join()
        return address * 10

    others: list[int] = []
    _, pointer = made(answer)
    assert [pointer(0), pointer(2), pointer(0)] == [11, 20, 11]
    assert others == [OTHERWISE + 3]
