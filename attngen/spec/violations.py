"""Violations: what keeps a spec from having kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One field that no kernel serves, why, and the nearest value that one does."""

    field: str
    reason: str
    nearest: Any
