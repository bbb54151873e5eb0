"""Processes that are killed at every step of what they do."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


def killed_at_each_line(act: Callable[[], object]) -> Iterator[bool]:
    """Runs `act` in one child after the other: the n-th is killed before the n-th line that it
    runs of attngen or zipfile. Yields after each whether it lived to the end; the last one does.
    """
    for line in itertools.count(1):
        child = os.fork()
        if child == 0:
            _run_until(line, act)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), f"died of {code} before line {line}"
        yield code == 0
        if code == 0:
            return


def _run_until(line: int, act: Callable[[], object]) -> None:
    """Never returns."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals["__name__"].startswith(("attngen.", "zipfile")):
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    code = 1
    try:
        sys.settrace(trace)
        act()
        sys.settrace(None)
        code = 0
    finally:
        os._exit(code)
