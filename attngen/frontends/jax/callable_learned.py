"""Gradients of captured arrays: a function's derivatives by the numbers that it reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...errors import SpecError
from .callable_graph import POSITIONS, SCORE, Node, arguments, graph_of
from .callable_lines import Lines
from .manual_axes import spread, varying

_NOTHING = "f:0.0"


class Lowered(NamedTuple):
    """A score as lines of a program: names of its value and of its derivative by the score, and
    loads of arrays that have gradients, each with the derivative by what it reads."""

    lines: Lines
    value: str
    slope: str
    learned: tuple[tuple[str, str], ...] = ()


def with_derivatives(result: Node) -> Lowered | None:
    """A score that learns what it captures; None where it captures nothing that may have a
    gradient, or where programs lack an operation of its derivatives.

    result: of a function of the score and of positions. An array that is of no trace has no
    gradient.
    """
    parts = list(dict.fromkeys(_parts(result)))
    learned = [n for n, each in enumerate(parts) if each.learns and _is_float(each)]
    if not learned:
        return None
    lines = Lines("score_mod")
    try:
        loads = [lines.number(each) for each in parts]
        read = [
            Node("input", each.shape, each.dtype, load, inputs=frozenset({load}))
            for each, load in zip(parts, loads, strict=True)
        ]
        given = (*arguments((SCORE, *POSITIONS)), *read)
        made = graph_of("score_mod", _joint(result, parts, learned), given)
        value, slope, *derivatives = (lines.number(each, "f") for each in made)
    except SpecError:
        return None
    found: dict[str, str] = {}
    for place, derivative in zip(learned, derivatives, strict=True):
        load = loads[place]
        found[load] = lines.built.emit("add", "f", found.get(load, _NOTHING), derivative)
    pairs = tuple((load, each) for load, each in found.items() if each != _NOTHING)
    return Lowered(lines, value, slope, pairs)


def _joint(result: Node, parts: Sequence[Node], learned: Sequence[int]) -> Any:
    """The function of a score, its place and the numbers that it reads that returns the result and
    its derivatives, by the score and by those numbers that are learned."""

    def joint(score: Array, *given: Array) -> tuple[Array, ...]:
        places, read = given[: len(POSITIONS)], given[len(POSITIONS) :]

        def wide(score: Array, values: Sequence[Array]) -> Array:
            known: dict[Node | str, Any] = dict(zip(parts, read, strict=True))
            known |= zip((parts[n] for n in learned), values, strict=True)
            known |= zip((SCORE, *POSITIONS), (score, *places), strict=True)
            return jnp.asarray(_evaluated(result, known), jnp.float32)

        by = (score, [read[n] for n in learned])
        value, (slope, slopes) = jax.value_and_grad(wide, (0, 1))(*by)
        return value, slope, *slopes

    return joint


def _parts(node: Node) -> Iterator[Node]:
    """Numbers of captured arrays that a value is made of, but for those that are places."""
    if node.is_part:
        yield node
        return
    for each in node.args:
        if each.reads:
            yield from _parts(each)


def _is_float(node: Node) -> bool:
    return bool(jnp.issubdtype(jnp.dtype(node.dtype), jnp.floating))


def _evaluated(node: Node, known: dict[Node | str, Any]) -> Any:
    """A node's value. known: those of arguments by their names, and of nodes, to which it adds."""
    if node.name == "input":
        return known[node.given]
    if node not in known:
        if not node.inputs and not node.reads:
            return node.evaluate()
        given = [_evaluated(each, known) for each in node.args]
        made = node.primitive.bind(*given, **node.params)
        known[node] = made[node.place] if node.primitive.multiple_results else made
    return known[node]


def stand_in(captures: Sequence[Array]) -> Array:
    """The array that stands in a call for what its score learns, float32 [n] for n numbers, whose
    gradient has those of the captures behind each other. Its own numbers are 0."""
    axes = varying(captures)
    return _stand_in(*[spread(x, axes) for x in captures])


@jax.custom_vjp
def _stand_in(*captures: Array) -> Array:
    nothing = jnp.zeros(sum(x.size for x in captures), jnp.float32)
    return spread(nothing, varying(captures))


def _stands(*captures: Array) -> tuple[Array, tuple[Array, ...]]:
    return _stand_in(*captures), captures


def _parted(captures: tuple[Array, ...], gradient: Array) -> tuple[Array, ...]:
    found, start = [], 0
    for x in captures:
        found.append(gradient[start : start + x.size].reshape(x.shape).astype(x.dtype))
        start += x.size
    return tuple(found)


_stand_in.defvjp(_stands, _parted)
