"""Operands of calls over an axis in 8 bits, stored once by scales of all its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...call.table import CARRIERS
from ...errors import SpecError
from .fp8 import largest, read, scaled
from .fp8_recipes import Float8CurrentScaling
from .manual_axes import spread, varying

DESCALES = tuple(f"descale_{name}" for name in CARRIERS)
SIXTEEN_BITS = ("float16", "bfloat16")


def check_recipe(recipe: Any, q: Array) -> None:
    """Raises: SpecError with every reason why a recipe serves no call over an axis."""
    reasons = []
    if not isinstance(recipe, Float8CurrentScaling):
        reasons.append(
            f"over several devices recipe needs a Float8CurrentScaling; got {type(recipe).__name__}"
        )
    elif recipe.backward == "fp8":
        reasons.append(
            "gradients are not made in 8 bits over several devices: take a recipe with "
            "backward='16' or 'fp8_or_16'"
        )
    if q.dtype.name not in SIXTEEN_BITS:
        reasons.append(f"a recipe stores float16 or bfloat16; got {q.dtype.name}. Cast it.")
    if reasons:
        raise SpecError(reasons)


def stored(
    recipe: Float8CurrentScaling,
    axis: str,
    given: Mapping[str, Array],
    used: Mapping[str, Array | None],
) -> dict[str, Array]:
    """The operands with q, k and v as bytes of stored numbers, which is how they travel, and with
    their descales, float32 [1].

    used: which tokens of q, k and v belong to a sequence, broadcasts of [b, t, h, d], None where
    all do.
    """
    dtype, _ = recipe.dtypes
    axes, found = varying([*given.values()]), dict(given)
    for name in CARRIERS:
        amax = jax.lax.pmax(largest(given[name], used[name]), axis)
        scale = spread(recipe.scale(amax, dtype), axes)
        numbers = scaled(given[name], dtype, scale)
        found[name] = jax.lax.bitcast_convert_type(numbers, jnp.uint8)
        found[f"descale_{name}"] = 1 / scale
    return found


def numbers_of(recipe: Float8CurrentScaling | None, x: Array) -> Array:
    """Stored numbers of bytes; of an array that is not stored itself."""
    if recipe is None:
        return x
    dtype, _ = recipe.dtypes
    found: Array = jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
    return found


def widened(
    recipe: Float8CurrentScaling, given: Mapping[str, Array], name: str, x: Array, dtype: str
) -> Array:
    """The numbers that bytes of the carrier of that name stand for."""
    return (read(numbers_of(recipe, x)) * given[f"descale_{name}"]).astype(dtype)
