"""Caches of calls, and how a test begins with empty ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from attngen.call import kernel_choice
from attngen.call.cache import CallCache
from attngen.frontends.pytorch.backward import backwards
from attngen.frontends.pytorch.backward_parts import prepared_parts
from attngen.frontends.pytorch.calls import calls
from attngen.frontends.pytorch.eight_bits import calls as eight_bit_calls
from attngen.frontends.pytorch.forward import prepared_calls
from attngen.frontends.pytorch.forward_onto import prepared_calls as joining_calls
from attngen.frontends.pytorch.fp8_backward import backwards as fp8_backwards
from attngen.frontends.pytorch.gradient_casts import prepared_d_o, prepared_steps
from attngen.frontends.pytorch.narrow import prepared_casts
from attngen.kernels.selection import name_of

FORWARD: tuple[CallCache[Any], ...] = (
    *(calls, eight_bit_calls, prepared_calls, prepared_casts, joining_calls),
)
BACKWARD: tuple[CallCache[Any], ...] = (
    *(backwards, fp8_backwards, prepared_d_o, prepared_steps, prepared_parts),
)


def held(*caches: CallCache[Any]) -> tuple[dict[Any, Any], ...]:
    """The dictionaries of some caches."""
    return tuple(each for cache in caches for each in (cache.recent, cache.by_format))


def forget(monkeypatch: Any, *caches: CallCache[Any]) -> None:
    """Leave some caches empty for a test."""
    for cache in caches:
        monkeypatch.setattr(cache, "recent", {})
        monkeypatch.setattr(cache, "by_format", {})


@contextlib.contextmanager
def kernels_of(arch: str) -> Iterator[set[str]]:
    """Let torch's calls run kernels of this target. Yields a set that has, once the block ends,
    the families of which kernels were loaded."""
    launched: set[str] = set()
    with contextlib.ExitStack() as stack:
        for place in ("routing", "descriptions"):
            name = f"attngen.frontends.pytorch.{place}.device_arch"
            stack.enter_context(mock.patch(name, lambda _: arch))
        for known in (*held(*FORWARD, *BACKWARD), kernel_choice._kernels):
            stack.enter_context(mock.patch.dict(known, clear=True))
        yield launched
        found = kernel_choice._kernels.values()
        launched |= {name_of(each.kernel) for group in found for each in group}
