"""Callbacks of C on the main thread, where signals' handlers may raise before a function's `try`.

Python raises what a signal's handler raises at the first instruction of what C calls; ctypes would
then return whatever the stack holds. A generator that was left inside its `try` has no such first
instruction, and nothing of Python's runs on the way to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any

Answer = Callable[[int], int]


class Callback:
    """A function of an address that C calls, and that returns a number without fail.

    It calls its function `otherwise` on each thread until `guard` is called there, which only the
    main thread needs: signals are handled there.
    """

    # Both lookups are C, from the slot of the type to the generator's `send`.
    __call__ = property(attrgetter("of_thread.answer"))

    def __init__(self, otherwise: Answer) -> None:
        # Of the type, since a thread's own beginnings would be Python's to make.
        kind = type("OfThread", (threading.local,), {"answer": staticmethod(otherwise)})
        self.of_thread: Any = kind()

    @property
    def is_guarded(self) -> bool:
        """Whether calls of this thread are."""
        return "answer" in self.of_thread.__dict__

    def guard(self, function: Answer, interrupted: int) -> None:
        """Have this thread's calls answered by a function, whatever signals' handlers raise.

        function: of the address, as for calls within one. interrupted: what is returned once where
        it could not run, or raised; the next call is `otherwise`'s again.
        """
        made = _answers(self.of_thread, function, interrupted)
        next(made)
        made.send(made.send)
        self.of_thread.answer = made.send


def _answers(of_thread: Any, function: Answer, interrupted: int) -> Generator[int, Any, None]:
    """Results for addresses; first of all it is sent its own `send`.

    A signal is noticed where a generator goes on, at calls and at jumps back: here all lie inside
    the `try`, and no other instruction behind it looks for one.
    """
    send = yield 0
    result = 0
    try:
        while True:
            address = yield result
            of_thread.answer = function  # for a call within this one
            result = function(address)
            of_thread.answer = send
    except GeneratorExit:
        return
    except BaseException:
        del of_thread.answer
    yield interrupted
