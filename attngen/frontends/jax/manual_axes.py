"""Axes of a mesh along which arrays differ inside `jax.shard_map`, as types of JAX say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array


def varying(arrays: Sequence[Any]) -> tuple[str, ...]:
    """Axes along which any of them differs, sorted; empty outside of `jax.shard_map`."""
    found: set[str] = set()
    for each in arrays:
        found |= {*_axes_of(each)}
    return tuple(sorted(found))


def _axes_of(array: Any) -> Any:
    kind = jax.typeof(array)
    manual = getattr(kind, "manual_axis_type", None)  # since jax 0.11
    return getattr(kind, "vma", ()) if manual is None else manual.varying


def spread(array: Array, axes: tuple[str, ...]) -> Array:
    """The array as one that may differ along these axes, which its gradient is a sum over."""
    own = _axes_of(array)
    missing = tuple([axis for axis in axes if axis not in own])
    return jax.lax.pcast(array, missing, to="varying") if missing else array
