"""Values of programs and of functions of positions, over arrays of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...fragments.program import Operation, Program

_DTYPES = {"f": "float32", "i": "int32", "l": "int64", "b": "bool"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(jnp, name) for name in (
        "exp exp2 log log2 log1p expm1 sin cos tanh sqrt floor ceil trunc round abs sign where "
        "fmod").split()},
    **{name: getattr(lax, name) for name in (
        "add sub mul ge gt le lt eq ne neg div pow rsqrt erf max min").split()},
    **{"and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor},
    **{"not": jnp.logical_not, "invert": jnp.bitwise_not, "sigmoid": jax.nn.sigmoid},
    **{"fdiv": jnp.floor_divide, "mod": jnp.remainder, "ratio": jnp.divide},
    **{"shl": jnp.left_shift, "shr": jnp.right_shift},
    "recip": lambda x: 1 / x,
    "cast": lambda x: x,
    "tdiv": lambda x, y: jnp.where(y == 0, 0, lax.div(x, jnp.where(y == 0, 1, y))),
}  # fmt: skip


def value_of(
    program: Program,
    captures: Sequence[Array],
    numbers: Sequence[int | float],
    known: Mapping[str, Array],
) -> Array:
    """A program's value. known: arrays of the score and of positions, by their names, that are
    broadcasts of each other. Scores of 64 bits are computed in these."""
    wide = "float64" if known["s"].dtype == jnp.float64 else "float32"
    values: dict[str, Any] = dict(known)

    def read(name: str) -> Any:
        kind, is_literal, word = name.partition(":")
        if name in values:
            return values[name]
        if is_literal:
            number: float = float(word) if kind == "f" else int(word)
        else:
            place = int(name[1:])
            kind, number = program.numbers[place], numbers[place]
        return jnp.asarray(number, dtype_of(kind))

    def dtype_of(type_: str) -> str:
        return wide if type_ == "f" else _DTYPES[type_]

    for place, each in enumerate(program.operations):
        if each.name == "load":
            made = _loaded(captures, each, read)
        else:
            made = _FUNCTIONS[each.name](*map(read, each.args))
        values[f"v{place}"] = made.astype(dtype_of(each.type))
    found: Array = read(program.value)
    return found


def _loaded(captures: Sequence[Array], load: Operation, read: Callable[[str], Any]) -> Any:
    """Elements of a captured array, at places that lie in it."""
    capture, *indices = load.args
    array = captures[int(capture)]
    places = []
    for size, index in zip(array.shape, indices, strict=True):
        at = read(index)
        places.append(jnp.clip(jnp.where(at < 0, at + size, at), 0, size - 1))
    return array[tuple(places)]


def over_positions(function: Callable[..., Any], *arrays: Array) -> Array:
    """A function of numbers over arrays of these, which are broadcasts of each other."""
    made: Array = jnp.vectorize(function)(*arrays)
    return made
