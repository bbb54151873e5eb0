"""Cubins that NVRTC made, kept from test to test of a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attngen.compiler import compile as compiler
from attngen.compiler.compile import Compiled
from attngen.io import files

RunNvrtc = Callable[[str, str, str], Compiled]


def remember(run_nvrtc: RunNvrtc) -> RunNvrtc:
    """A `run_nvrtc` that compiles a source once for each architecture, options and headers.

    Errors are not kept.
    """
    known: dict[Any, Compiled] = {}

    def run(text: str, name: str, arch: str) -> Compiled:
        key = (text, name, arch, compiler.OPTIONS, *files.headers().items())
        if key not in known:
            known[key] = run_nvrtc(text, name, arch)
        return known[key]

    return run
