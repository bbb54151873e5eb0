"""Caches of calls, and how a test begins with empty ones."""

from __future__ import annotations

from typing import Any

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
