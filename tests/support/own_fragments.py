"""Fragments that tests register, which are gone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from attngen.fragments import features


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is registered inside is forgotten in the end."""
    known = features.scan()
    before = {axis: dict(fragments) for axis, fragments in known.items()}
    try:
        yield
    finally:
        for axis, fragments in known.items():
            fragments.clear()
            fragments |= before[axis]
