"""Refusals of JAX's arrays: types, and what a call says that no definition has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import Array

from ...call import decode
from ...call.checks import violations
from ...call.length_checks import length_violations
from ...call.numbers import Arguments
from ...call.operands import extents_of, outputs_of, unpacked
from ...call.position_checks import position_violations
from ...call.table import CARRIERS, OPTIONAL, ROW_OF_OPERAND, ROWS, AttentionCall, names
from ...call.tensors import TensorDesc, named
from ...errors import SpecError
from ...io.text import quoted
from ...spec import layouts
from .fragment_checks import fragment_violations

SOFTMAXES = ("vanilla", "off_by_one", "learnable")
BIAS_TYPES = ("post_scale", "pre_scale", "alibi")
TENSORS = names("tensor", "lengths", "scale")
FLOATS = ("float16", "bfloat16", "float32", "float64")
# Operands of scores and the softmax that the definition (`reference`) and the transforms know.
DEFINED = ("attn_mask", "bias", "alibi_slopes", "sink", "positions")


def is_array(value: object) -> bool:
    """Whether this is an array of JAX, traced or not, or of NumPy."""
    return isinstance(value, (Array, np.ndarray))


def check_types(call: AttentionCall) -> None:
    """Raises: SpecError with every argument of a type that calls of JAX do not take."""
    if reasons := [*_type_violations(call)]:
        raise SpecError(reasons)


def _type_violations(call: AttentionCall) -> Iterator[str]:
    for name in TENSORS:
        value = getattr(call, name)
        if is_array(value) or (value is None and name != "q"):
            continue
        yield f"{name} needs an array; got {type(value).__name__}. Pass a jax.Array."
    slopes = call.alibi_slopes
    if not (slopes is None or isinstance(slopes, bool) or is_array(slopes)):
        yield f"alibi_slopes needs an array, or True for ALiBi's own; got {slopes!r}"
    if any(not is_array(table) for table in call.page_tables):
        yield "page_table needs an array, or a pair of them for K and V. Pass jax.Arrays."
    for name in TENSORS:
        value = getattr(call, name)
        if is_array(value) and not all([isinstance(size, int) for size in value.shape]):
            yield f"{name} {list(value.shape)}: sizes are numbers; export a program for each"
    for name in names("number"):
        value = getattr(call, name)
        if isinstance(value, jax.core.Tracer):
            yield f"{name} needs a number that is known while tracing; got a traced array"
        elif not (isinstance(value, (int, float)) or value is ROWS[name].default):
            yield f"{name} needs a number; got {type(value).__name__}"
    for name in names("flag"):
        if not hasattr(value := getattr(call, name), "__bool__"):
            yield f"{name} needs True or False; got {quoted(value)}. Pass one, or leave it out."
    for name in names("word"):
        if not isinstance(value := getattr(call, name), str):
            given = named(as_given(value)) if is_array(value) else quoted(value)
            advice = ". Pass booleans a pair as attn_mask." if name == "mask" else ""
            yield f"{name} needs a word; got {given}{advice}"
    for name in call.functions:
        yield (
            f"{name} is a function, which this call does not take; name fragments, or pass "
            "attn_mask or bias"
        )
    for name, row in ROWS.items():
        unknown = (row.feature or row.gradient) and name not in DEFINED
        if unknown and getattr(call, name) is not None:
            yield f"{name} has no definition over arrays of JAX yet; leave it out"
    for name in names("starts"):
        if getattr(call, name) is not None:
            yield f"{name} has no definition over arrays of JAX yet; leave it out"
    for name in ("schedule", "out"):
        if getattr(call, name) is not None:
            yield f"{name} belongs to tensors of torch; leave it out"
    if call.out_layout != ROWS["out_layout"].default:
        yield f"out_layout={call.out_layout!r} belongs to tensors of torch; XLA lays arrays out"
    if call.deterministic not in (None, True, False):
        yield f"deterministic needs True, False or None; got {call.deterministic!r}"
    if call.bottom_right not in (None, True, False):
        yield f"bottom_right needs True, False or None; got {quoted(call.bottom_right)}"
    if not _is_window(call.window):
        yield f"window needs two sides, each −1, None or keys; got {call.window!r}"


def _is_window(window: object) -> bool:
    if not isinstance(window, tuple) or len(window) != 2:
        return False
    return all(side is None or (type(side) is int and side >= -1) for side in window)


def check_call(call: AttentionCall, state: Any) -> None:
    """Raises: SpecError with every reason why a call of arrays means nothing, before any of them is
    converted. state: of dropout, whatever form it has."""
    layout = layouts.parse(call.layout)
    q, k, v = (None if x is None else as_given(x) for x in (call.q, call.k, call.v))
    layouts.check_operands(layout, q, k, v)
    decode.check_splits(call.num_splits)
    reasons = [*_word_violations(call), *fragment_violations(call, is_array)]
    reasons += _number_violations(call, state)
    reasons += position_violations(call, layout.paged)
    if reasons := [*reasons, *_length_violations(call, layout)]:
        raise SpecError(reasons)


def _word_violations(call: AttentionCall) -> Iterator[str]:
    if call.softmax not in SOFTMAXES:
        yield f"softmax={call.softmax!r} is not a softmax. Use one of {', '.join(SOFTMAXES)}."
    if call.bias_type not in BIAS_TYPES:
        yield f"bias_type={call.bias_type!r} is not a type. Use one of {', '.join(BIAS_TYPES)}."
    if call.bias_type == "alibi" and call.bias is not None:
        yield "bias_type='alibi' takes no bias; pass alibi_slopes=True to have both"
    if call.bias_type == "alibi" and call.alibi_slopes is False:
        yield "bias_type='alibi' contradicts alibi_slopes=False. Leave one of them out."
    if call.bottom_right is False and call.mask.endswith("bottom_right"):
        yield f"mask={call.mask!r} aligns to the bottom right; got bottom_right=False"
    if call.bias is not None and (dtype := as_given(call.bias).dtype) not in FLOATS:
        yield f"bias needs floats; got {dtype}. Pass booleans as attn_mask."


def _number_violations(call: AttentionCall, state: Any) -> Iterator[str]:
    if call.softmax_scale is not None and not math.isfinite(call.softmax_scale):
        yield f"softmax_scale needs a finite number; got {call.softmax_scale!r}"
    if not 0 <= call.softcap < math.inf:
        yield f"softcap needs a cap > 0, or 0 for none; got {call.softcap!r}"
    if not 0 <= call.dropout_p <= 1:
        yield f"dropout_p needs a probability in 0..1; got {call.dropout_p!r}"
    elif call.dropout_p > 0 and state is None:
        yield (
            f"dropout_p={call.dropout_p} needs rng_state: a key of jax.random, or seed and offset. "
            "There is no generator to draw one from."
        )


def _length_violations(call: AttentionCall, layout: layouts.Layout) -> Iterator[str]:
    batch = 0
    if layout.q_format != "thd":
        batch = layouts.size(layouts.shape_of(layout, "q", call.q, call.k), layout.q_format, "b")
    elif (ends := call.lengths("q", layout).cu_seqlens) is not None:
        batch = max(as_given(ends).numel() - 1, 0)
    yield from length_violations(described(call), layout, batch)


def described(call: AttentionCall) -> AttentionCall:
    """The call with descriptions of its arrays."""
    given = {name: getattr(call, name) for name in (*TENSORS, "k", "v")}
    own: dict[str, Any] = {name: as_given(x) for name, x in given.items() if is_array(x)}
    own["page_table"] = tuple(map(as_given, call.page_tables)) or None
    rest = {name: getattr(call, name) for name in ("layout", "mask", "softmax", "bias_type")}
    return AttentionCall(**own, **rest)


def as_given(x: Any) -> TensorDesc:
    """The description of an array, whose elements follow each other as far as a call can see."""
    return TensorDesc.contiguous(x.shape, x.dtype.name)


def check_operands(operands: Mapping[str, TensorDesc | None], arguments: Arguments) -> None:
    """Raises: SpecError with every fault of operands, as operations take them, that agree with no
    definition, whether or not kernels serve the call."""
    operands = {name: _as_float32(name, x) for name, x in operands.items()}
    own: dict[str, Any] = {name: operands[name] for name in CARRIERS}
    q, k, v = unpacked(own["q"], own["k"], own["v"], arguments.layout)
    out, _ = outputs_of(q, v, arguments)
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "o": out}
    optional = {name: operands[name] for name in OPTIONAL}
    plain = arguments._replace(softmax_scale=None, softcap=0.0)  # what kernels take of these is own
    extents = extents_of(tensors, arguments.layout)
    if reasons := violations(tensors, extents, optional, plain):
        raise SpecError(reasons)


def _as_float32(name: str, x: TensorDesc | None) -> TensorDesc | None:
    """An operand that is float32 beside all but float64 as it is there."""
    if x is None or (x.dtype, ROW_OF_OPERAND[name].dtype) != ("float64", "float32"):
        return x
    return replace(x, dtype="float32")
