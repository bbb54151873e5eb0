"""Doors for code that calls another library's attention: that library's names, attngen's kernels.

    from attngen.integrations.torch import sdpa

Each door is a module of the library's name, found when it is first asked for, and imports the
library only where it is used. All build on attngen's public names alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

DOORS = ("diffusers", "flash_attn", "flash_attn_interface", "torch", "transformers", "xformers")


def __getattr__(name: str) -> Any:
    if name not in DOORS:
        raise AttributeError(f"module 'attngen.integrations' has no attribute {name!r}")
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *DOORS})
