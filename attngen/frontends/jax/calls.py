"""Calls of JAX's arrays as operations take them: dtypes, lengths, slopes, the state of dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...call import operation_form
from ...call.fp8_checks import BIAS_DTYPE
from ...call.numbers import Arguments
from ...call.positions import Positions
from ...call.table import (
    INPUTS,
    LENGTHS,
    PAGE_TABLES,
    ROW_OF_OPERAND,
    ROWS,
    AttentionCall,
    named,
    names,
)
from ...call.tensors import FP8, TensorDesc
from ...errors import SpecError
from ...spec import layouts, plain
from . import checks
from .fp8 import largest_of

STATE = TensorDesc.contiguous((2,), "int64")
"""Dropout's seed and offset, as kernels read the four words that a program holds them in."""
Operands = dict[str, "Array | None"]
# Arguments that are no operands here: longest lengths change no result, and a state has many forms.
UNREAD = dict.fromkeys(("rng_state", *names("longest")))


@dataclass(frozen=True)
class CheckedCall:
    """A call whose arguments agree: its operands by the names of `table.INPUTS`, its numbers, and
    the backend that it names; a `score_mod` that only the definition can compute."""

    operands: Operands
    arguments: Arguments
    backend: str
    score_mod: Callable[..., Array] | None = None

    @property
    def descriptions(self) -> dict[str, TensorDesc | None]:
        """The operands as checks and kernels see them."""
        return {name: describe(name, x) for name, x in self.operands.items()}

    def described(self) -> AttentionCall:
        """The call again, of descriptions, as the choice of kernels sees it."""
        found, arguments = self.descriptions, self.arguments
        own = {name: x for name, x in found.items() if name in ROWS and x is not None}
        tables = tuple(x for name in PAGE_TABLES if (x := found[name]) is not None)
        return AttentionCall(
            **own,  # type: ignore[arg-type]  # descriptions of arrays
            page_table=tables or None,  # type: ignore[arg-type]
            layout=arguments.layout,
            mask=arguments.mask,
            window=(arguments.window_left, arguments.window_right),
            bias_type=arguments.bias_type,
            positions=Positions.read(arguments.positions) if arguments.positions else None,
            softcap=arguments.softcap,
            score_mod=arguments.score_mod or None,
            softmax=arguments.softmax,
            dropout_p=arguments.dropout_p,
            out_dtype=arguments.out_dtype,  # type: ignore[arg-type]  # its name
            return_max_logit=arguments.max_logit,
            num_splits=arguments.num_splits or None,
        )


def describe(name: str, x: Any) -> TensorDesc | None:
    """The description of an operand, None for none."""
    if x is None:
        return None
    return STATE if name == "rng_state" else checks.as_given(x)


def checked(call: AttentionCall) -> AttentionCall:
    """The call with plain arguments, and without its state. Raises: SpecError with every argument
    that means nothing, whatever the dtypes are."""
    _refuse_traced_numbers(call)
    given = {**named(call), **UNREAD}
    found = AttentionCall(**{**given, **plain.differing(given)})
    checks.check_types(found)
    checks.check_call(found, call.rng_state)
    return found


def converted(call: AttentionCall) -> CheckedCall:
    """The call as operations take it. Raises: SpecError with every violation."""
    state, call = call.rng_state, checked(call)
    if call.out_dtype is not None:
        dtype: Any = call.out_dtype
        call = AttentionCall(**{**named(call), "out_dtype": jnp.dtype(dtype).name})
    arrays = _as_arrays(call)
    found = dict(zip(INPUTS, operation_form.operands_of(arrays, Array), strict=True))
    arguments = operation_form.arguments_of(arrays, False, Array)
    found |= _lengths(arguments.layout, found)
    q = found["q"].dtype.name
    for name, x in found.items():
        if x is not None and (dtype := _dtype_of(name, x, q)) is not None:
            found[name] = saturated(x, dtype)
    if heads := operation_form.default_slopes_of(arrays, Array):
        found["alibi_slopes"] = jnp.asarray(default_slopes(heads))
    if arguments.dropout_p > 0:
        found["rng_state"] = words_of_state(state)
    else:
        found["rng_state"] = None
    made = CheckedCall(found, arguments, call.backend)
    checks.check_operands(made.descriptions, arguments)
    return made


def _refuse_traced_numbers(call: AttentionCall) -> None:
    """Raises: SpecError where a number is traced, whose value nobody knows yet."""
    traced = [
        f"{name} needs a number that is known while tracing; got a traced array"
        for name in ("softmax_scale", "softcap", "dropout_p")
        if isinstance(getattr(call, name), jax.core.Tracer)
    ]
    if traced:
        raise SpecError(traced)


def _as_arrays(call: AttentionCall) -> AttentionCall:
    """The call with NumPy's arrays as JAX's."""
    changed: dict[str, Any] = {
        name: jnp.asarray(x) for name, x in named(call).items() if isinstance(x, np.ndarray)
    }
    if call.page_table is not None:
        changed["page_table"] = tuple(map(jnp.asarray, call.page_tables))
    added = tuple(
        (name, jnp.asarray(x) if isinstance(x, np.ndarray) else x)
        for name, x in call.fragment_arguments
    )
    return AttentionCall(**{**named(call), **changed, "fragment_arguments": added})


def lengths_of(call: AttentionCall) -> Operands:
    """The lengths of a call's sides, by the names of operands, as `converted` has them."""
    given: Operands = {name: None for name in (*LENGTHS, *PAGE_TABLES)}
    given |= {name: jnp.asarray(x) for name in LENGTHS if (x := getattr(call, name)) is not None}
    return _lengths(call.layout, given)


def _lengths(layout: str, found: Operands) -> Operands:
    """The lengths of both sides: int32, those of dense operands as `seqused`."""
    parsed = layouts.parse(layout)
    sides = {side: [name for name in LENGTHS if name.partition(f"_{side}")[1]] for side in _SIDES}
    given = {side: [found[name] for name in own] for side, own in sides.items()}
    if parsed.one_length:
        for one, other in (("q", "kv"), ("kv", "q")):
            if all(x is None for x in given[one]):
                given[one] = given[other]
    settled: Operands = {}
    for (side, own), axes in zip(sides.items(), parsed.formats, strict=True):
        values = dict(zip(own, given[side], strict=True))
        ends = values[f"cu_seqlens_{side}"]
        if axes != "thd" and ends is not None:
            values = {**dict.fromkeys(own), f"seqused_{side}": jnp.diff(ends)}
        settled |= values
    return {
        name: None if x is None else x.astype(jnp.int32)
        for name, x in (*settled.items(), *((name, found[name]) for name in PAGE_TABLES))
    }


_SIDES = ("q", "kv")


def _dtype_of(name: str, x: Array, q: str) -> str | None:
    """The dtype that an operand is cast to; None where it stays as it is."""
    if x.dtype.name not in checks.FLOATS:
        return None
    wants = ROW_OF_OPERAND[name].dtype
    if wants == "q":
        beside_fp8 = BIAS_DTYPE if name == "bias" else x.dtype.name
        wanted = beside_fp8 if q in FP8 else q
    elif wants == "float32":
        wanted = "float64" if q == x.dtype.name == "float64" else "float32"
    else:
        return None
    return None if wanted == x.dtype.name else wanted


def saturated(x: Array, dtype: str) -> Array:
    """An array in another floating dtype, with its gradient: finite numbers out of range become the
    largest finite ones, and −∞ stays."""
    largest = largest_of(dtype)
    if largest_of(x.dtype.name) > largest:
        x = jnp.where(x == -jnp.inf, x, jnp.clip(x, -largest, largest))
    return x.astype(dtype)


def default_slopes(heads: int) -> np.ndarray[Any, Any]:
    """ALiBi's own slopes, float32 [heads]; `attngen.reference.default_alibi_slopes` cites them."""
    n = 1 << (heads.bit_length() - 1) if heads > 0 else 1
    k = np.arange(1, heads + 1, dtype=np.float64)
    exponents = np.where(k <= n, 8 / n * k, 4 / n * (2 * (k - n) - 1))
    return np.exp2(-exponents).astype(np.float32)


def words_of_state(state: Any) -> Array:
    """Seed and offset as four words, uint32, low halves first.

    state: a key of jax.random, whose words these become, 0 behind them; uint32 [4]; uint32 [2], a
    seed; int64 [2], seed and offset, where JAX has 64 bits; a pair of Python's ints.

    Raises: SpecError where it is none of these.
    """
    if isinstance(state, (tuple, list)) and all(isinstance(x, int) for x in state):
        if len(state) == 2 and all(-(1 << 63) <= x < 1 << 63 for x in state):
            halves = [(x >> shift) & 0xFFFFFFFF for x in state for shift in (0, 32)]
            return jnp.asarray(np.array(halves, np.uint32))
    if isinstance(state, np.ndarray) and (state.dtype.name, state.shape) == ("int64", (2,)):
        return jnp.asarray(state.view(np.uint32))
    if checks.is_array(state):
        if jnp.issubdtype(state.dtype, jax.dtypes.prng_key) and state.shape == ():
            state = jax.random.key_data(state)
        kind = state.dtype.name, state.shape
        if kind == ("int64", (2,)):
            return jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(4)
        if kind in (("uint32", (2,)), ("uint32", (4,))):
            return jnp.pad(jnp.asarray(state), (0, 4 - state.size))
    got = f"{state.dtype} {list(state.shape)}" if checks.is_array(state) else repr(state)
    raise SpecError(
        f"rng_state needs a key of jax.random, uint32 [2] or [4], int64 [2] or a pair of ints; "
        f"got {got}"
    )
