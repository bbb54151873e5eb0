"""Calls with functions of positions: a `score_mod` becomes a score of kernels, a mask booleans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ...call.backend import check_backend
from ...call.fragments import LEARNED, SLOTS
from ...call.function_checks import check_function
from ...call.table import AttentionCall, named
from ...call.tensors import FP8
from ...errors import SpecError
from ...fragments.features import register_program
from ...fragments.names import CAPTURED, NUMBER, PER_UNIT, UNIT
from ...fragments.program import Program
from ...spec import layouts
from .callable_graph import (
    POSITIONS,
    SCORE,
    ResultError,
    arguments,
    check_result,
    graph_of,
    results_of,
    traced,
)
from .callable_learned import Lowered, stand_in, with_derivatives
from .callable_lines import Lines, element_of
from .callable_values import over_positions

log = logging.getLogger("attngen")
_WAY_OUT = "Pass backend='reference'"
_MOST_LOGGED = 256
ScoreMod = Callable[..., Array]


@dataclass(frozen=True)
class Traced:
    """A function's program, with what a call passes for it: captured arrays, and numbers."""

    program: Program
    captures: tuple[Array, ...]
    numbers: tuple[int | float, ...]

    @property
    def arguments(self) -> tuple[tuple[str, Any], ...]:
        """The arguments of a call that names the program's fragment. What it learns has its
        gradients in one array that stands for all of it."""
        learned = self.program.learned_captures
        captures = [
            (f"{CAPTURED}{n}", jax.lax.stop_gradient(x) if n in learned else x)
            for n, x in enumerate(self.captures)
        ]
        if learned:
            captures.append((LEARNED, stand_in([self.captures[n] for n in learned])))
        numbers = [(f"{NUMBER}{n}", x) for n, x in enumerate(self.numbers)]
        return (*captures, *numbers, (UNIT, 1.0), (PER_UNIT, 1.0))


def without_functions(call: AttentionCall) -> tuple[AttentionCall, ScoreMod | None]:
    """A call of arrays alone that stands for one with functions, and the `score_mod` that only the
    definition can compute, if it has one.

    Raises: SpecError where a function is none of positions, or the call names kernels, which lack
    what it does.
    """
    check_backend(call.backend)
    if call.block_mask is not None:
        raise SpecError("block_mask belongs to tensors of torch; pass its mask_mod")
    for name in call.functions:
        check_function(name, getattr(call, name))
    changed: dict[str, Any] = {}
    if call.mask_mod is not None:
        shown, others = _shown(call), cast("Array | None", call.attn_mask)
        changed |= {"mask_mod": None, "attn_mask": shown if others is None else others & shown}
    if "score_mod" not in call.functions:
        return AttentionCall(**{**named(call), **changed}), None
    mod, changed["score_mod"] = call.score_mod, None
    if (dtype := jnp.asarray(call.q).dtype.name) in FP8:
        raise SpecError(f"score_mod beside {dtype} has no kernels yet. {_WAY_OUT}.")
    found = None if call.backend == "reference" else _served(mod, call.backend)
    if found is None:
        return AttentionCall(**{**named(call), **changed}), mod  # type: ignore[return-value]
    changed["score_mod"] = register_program(found.program).name
    changed["fragment_arguments"] = (*call.fragment_arguments, *found.arguments)
    return AttentionCall(**{**named(call), **changed}), None


def _served(mod: Any, backend: str) -> Traced | None:
    """The trace of a score_mod; None where kernels lack it. Raises: SpecError where the call names
    kernels, or the function returns no score."""
    try:
        return trace(mod)
    except ResultError:
        raise
    except SpecError as error:
        if backend == "cuda":
            raise
        _log_once(str(error))
        return None


@lru_cache(_MOST_LOGGED)  # said once
def _log_once(reason: str) -> None:
    log.warning("attention runs on its definition in jax.numpy: %s", reason)


def trace(mod: ScoreMod) -> Traced:
    """The program of a `score_mod`, and of its derivative by the score.

    Raises: SpecError naming what programs lack.
    """
    names = arguments((SCORE, *POSITIONS))
    closed = traced("score_mod", mod, names)  # once: what it makes anew would be another capture
    result = check_result("score_mod", results_of(closed, names), "floating")
    lines, value, slope, learned = with_derivatives(result) or _by_score(closed)
    captures = tuple([_as_read(x) for x in lines.captures])
    if len(captures) > len(SLOTS):
        raise SpecError(
            f"score_mod reads {len(captures)} captured arrays; kernels take {len(SLOTS)}. Stack "
            "some of them into one."
        )
    if any(not x.size or x.size >= 1 << 31 for x in captures):
        raise SpecError("score_mod reads a captured array of no elements, or of 2**31 of them.")
    program = Program(
        captures=tuple([(element_of(x), x.ndim, "i") for x in captures]),
        numbers=tuple([type_ for type_, _ in lines.built.numbers]),
        operations=tuple(lines.built.operations),
        value=value,
        slope=slope,
        learned=learned,
    )
    return Traced(program, captures, tuple([number for _, number in lines.built.numbers]))


def _by_score(closed: ClosedJaxpr) -> Lowered:
    """A score that learns nothing, and its derivative. Raises: as `trace`."""

    def wide(*given: Any) -> Any:
        (made,) = jaxpr_as_fun(closed)(*given)
        return made.astype(jnp.float32)

    lines = Lines("score_mod")
    both = graph_of("score_mod", jax.value_and_grad(wide), arguments((SCORE, *POSITIONS)))
    value, slope = (lines.number(each, "f") for each in both)
    return Lowered(lines, value, slope)


def _as_read(array: Array) -> Array:
    """A captured array as kernels read it: in such a dtype, and with an axis."""
    return jnp.atleast_1d(array.astype(element_of(array)))


def _shown(call: AttentionCall) -> Array:
    """The pairs that a `mask_mod` shows, bool, a broadcast of [b, h, s_q, s_kv]. Raises: SpecError
    where it returns no bool, or the call reads pages."""
    mod: Any = call.mask_mod
    seen = check_result("mask_mod", graph_of("mask_mod", mod, arguments(POSITIONS)), "bool")
    sizes = _sizes(call)
    axes = [
        jnp.arange(size if name in (*seen.inputs, "i", "j") else 1, dtype=jnp.int32)
        for name, size in zip(POSITIONS, sizes, strict=True)
    ]
    spread = jnp.ix_(*axes)
    shape = tuple([axis.size for axis in axes])
    return jnp.broadcast_to(over_positions(mod, *spread), shape)


def _sizes(call: AttentionCall) -> Sequence[int]:
    """Sequences, query heads, queries and keys of a call; of packed tokens any sequence may have
    all. Raises: SpecError of one that reads pages."""
    layout = layouts.parse(call.layout)
    if layout.paged:
        raise SpecError(f"mask_mod over pages has no kernels yet. Pass attn_mask. {_WAY_OUT}.")
    layouts.check_operands(layout, call.q, call.k, call.v)
    found = []
    for name, axes in zip("qk", layout.formats, strict=True):
        sizes = dict(zip(axes, layouts.shape_of(layout, name, call.q, call.k), strict=True))
        found.append(sizes)
    of_q, of_kv = found
    lengths = [each.get("s", each.get("t", 0)) for each in (of_q, of_kv)]
    ends = call.lengths("q", layout).cu_seqlens
    packed = 1 if ends is None else ends.shape[0] - 1
    return (of_q.get("b", packed), of_q["h"], *lengths)
