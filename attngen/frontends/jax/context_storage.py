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
from .fp8_recipes import DelayedScaling, Float8CurrentScaling, Recipe, check_scales

DESCALES = tuple(f"descale_{name}" for name in CARRIERS)
SCALES = "scales"  # the operand that has those of all carriers
SIXTEEN_BITS = ("float16", "bfloat16")


def check_recipe(recipe: Any, scales: Any, q: Array) -> None:
    """Raises: SpecError with every reason why a recipe serves no call over an axis, or why these
    scales are not its state."""
    reasons = []
    if not isinstance(recipe, (Float8CurrentScaling, DelayedScaling)):
        reasons.append(
            "over several devices recipe needs a Float8CurrentScaling or a DelayedScaling; got "
            f"{type(recipe).__name__}"
        )
    elif recipe.by_token:
        reasons.append(
            "operands travel with one scale each over several devices: take a recipe with "
            "scaling='tensor'"
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
    check_scales(recipe, scales)


def maxima_of(axis: str, given: Mapping[str, Array], used: Mapping[str, Array | None]) -> Array:
    """The largest magnitudes of q, k and v on all devices of an axis, float32 [3].

    used: which tokens of each belong to a sequence, broadcasts of [b, t, h, d], None where all do.
    """
    found = [largest(jax.lax.stop_gradient(given[name]), used[name]) for name in CARRIERS]
    made: Array = jax.lax.pmax(jnp.concatenate(found), axis)
    return made


def scales_of(recipe: Recipe, maxima: Array, known: Array | None) -> Array:
    """Scales of q, k and v, float32 [3]. known: those of a history, 0 where there is none yet; None
    of a recipe that has none."""
    dtype, _ = recipe.dtypes
    own = recipe.scale(maxima, dtype)
    return own if known is None else jnp.where(known > 0, known, own)


def stored(recipe: Recipe, given: Mapping[str, Array]) -> dict[str, Array]:
    """The operands with q, k and v as bytes of stored numbers, which is how they travel, and with
    their descales, float32 [1], instead of the scales by which they are stored."""
    dtype, _ = recipe.dtypes
    found = {name: x for name, x in given.items() if name != SCALES}
    for place, name in enumerate(CARRIERS):
        scale = given[SCALES][place : place + 1]
        numbers = scaled(given[name], dtype, scale)
        found[name] = jax.lax.bitcast_convert_type(numbers, jnp.uint8)
        found[f"descale_{name}"] = 1 / scale
    return found


def numbers_of(recipe: Recipe | None, x: Array) -> Array:
    """Stored numbers of bytes; of an array that is not stored itself."""
    if recipe is None:
        return x
    dtype, _ = recipe.dtypes
    found: Array = jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
    return found


def widened(recipe: Recipe, given: Mapping[str, Array], name: str, x: Array, dtype: str) -> Array:
    """The numbers that bytes of the carrier of that name stand for."""
    return (read(numbers_of(recipe, x)) * given[f"descale_{name}"]).astype(dtype)
