"""Limits of memory that the environment may name."""

from __future__ import annotations

import os

from ..errors import SpecError
from ..io.text import printable


def bytes_named(variable: str, otherwise: int) -> int:
    """The bytes of a limit that an environment variable names in megabytes; `otherwise` where it
    names none. Raises: SpecError where that is no number."""
    if not (named := os.environ.get(variable)):
        return otherwise
    if not (named.isascii() and named.isdigit() and len(named) < 10):
        said = named if len(named) <= 80 else f"{named[:80]}…"
        whole = otherwise >> 20
        raise SpecError(f"{variable}={printable(said)}: expected whole megabytes, as {whole}")
    return int(named) << 20
