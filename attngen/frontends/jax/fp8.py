"""FP8 in plain jax.numpy: what stored numbers stand for, and a softmax whose weights are e4m3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...call.fp8_scales import LARGEST_EXPONENT
from ...call.numbers import Arguments
from ...call.table import CARRIERS
from ...call.tensors import FP8
from ...spec.call_arguments import TOKEN_AXES
from ...spec.layouts import Layout, order_of_rows
from .places import Rows

DEFAULT_SCALE_S = 256.0  # of weights, as `attngen.reference.fp8` has it
VALUE_BINADES = 60  # of the scales of values from 1, either way, that weights are multiplied by
Operands = Mapping[str, "Array | None"]


def dequantised(x: Array, descale: Array | None, rows: Rows, dtype: Any) -> Array:
    """A carrier [n, rows, h, d] in the dtype of scores. descale: [1], [b, h_kv] or, one a token and
    head, [b, h, s], of packed tokens [1, h, t]."""
    name = x.dtype.name
    x = read(x).astype(dtype) if name in FP8 else x.astype(dtype)
    if name not in FP8 or descale is None:
        return x
    if descale.ndim == 1:
        return x * descale.astype(dtype)
    if is_per_token(descale):
        scales = jnp.swapaxes(descale, 1, 2).reshape(x.shape[:3])
        return x * jnp.where(rows.used[..., None], scales, 1).astype(dtype)[..., None]
    heads = descale.astype(dtype)[rows.sequence]
    return x * jnp.repeat(heads, x.shape[2] // heads.shape[-1], axis=-1)[..., None]


def is_per_token(descale: Array | None) -> bool:
    """Whether scales are one a token and head, [b, h, s], or of packed tokens [1, h, t]."""
    return descale is not None and descale.ndim == TOKEN_AXES


def value_scales(descale: Array, rows: Rows, s: Array) -> Array:
    """Scales of values as weights are multiplied by them, [n, h_q, 1, columns], within what their
    logarithms leave finite. s: scores, [n, h_q, rows, columns]."""
    n, heads, _, columns = s.shape
    scales = jnp.moveaxis(descale, 1, 0).reshape(-1, n, columns).swapaxes(0, 1)
    scales = jnp.where(rows.used[:, None], scales, 1).astype(s.dtype)
    scales = jnp.clip(scales, 2.0**-VALUE_BINADES, 2.0**VALUE_BINADES)
    return jnp.repeat(scales, heads // scales.shape[1], axis=1)[:, :, None]


def weights(
    operands: Operands, s: Array, sink: Array, values: Array | None = None
) -> tuple[Array, Array]:
    """Probabilities of weights that are stored in e4m3, and the LSE of those before they are.

    values: scales of values, [n, h, 1, columns], that weights are multiplied by before they are
    stored.
    """
    raised = s if values is None else s + jnp.log(values)
    maximum = jnp.max(raised, axis=-1, keepdims=True, initial=-jnp.inf)
    maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    exps = jnp.exp(raised - maximum)
    sums = jnp.exp(s - maximum).sum(-1, keepdims=True)
    total = sums + jnp.exp(sink - maximum)
    lse = jnp.logaddexp(maximum + jnp.log(sums), sink)
    scale, descale = operands["scale_s"], operands["descale_s"]
    up = DEFAULT_SCALE_S if scale is None else scale.astype(s.dtype)
    down = 1 / DEFAULT_SCALE_S if descale is None else descale.astype(s.dtype)
    made = read(quantised(exps * up, "float8_e4m3fn")).astype(s.dtype) * down
    return made / jnp.where(total == 0, 1, total), lse.reshape(lse.shape[:-1])


def stored(out: Array, operands: Operands, arguments: Arguments) -> Array:
    """The output in the dtype of the call, scaled and saturated where that is FP8."""
    dtype = arguments.out_dtype
    if dtype is None:
        q = operands["q"]
        assert q is not None  # every call has it
        dtype = q.dtype.name
    if dtype not in FP8:
        return out.astype(dtype)
    scale = operands["scale_o"]
    return quantised(out if scale is None else out * scale.astype(out.dtype), dtype)


def by_heads(rows: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
    """Scales of q, k and v as calls take them, [b, h, s], or of packed tokens [1, h, t]. rows: of
    each row of their carriers, by the carriers' names."""
    found = {}
    for name in CARRIERS:
        carrier, axis, place = layout.home(name)
        x = rows[carrier]
        if axis:
            x = jnp.take(x, place, axis=axis + 1)  # of axes without the last
        x = x.transpose(order_of_rows(layout, name))
        found[f"descale_{name}"] = x if x.ndim == 3 else x[None]
    return found


def by_rows(scales: Array, axes: list[str]) -> Array:
    """Scales [b, h, s], or of packed tokens [1, h, t], as they multiply an array of these axes, one
    of which may be that of parts packed into it."""
    packed = "t" in axes
    names = "ht" if packed else "bhs"
    own = [each for each in axes if each in names]
    rows = jnp.squeeze(scales, 0) if packed else scales
    ordered = rows.transpose([names.index(each) for each in own])
    sizes = dict(zip(own, ordered.shape, strict=True))
    return ordered.reshape([sizes.get(each, 1) for each in axes])


def largest_of(dtype: str) -> float:
    """The largest finite number of a floating dtype."""
    found: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(found.max)


@cache
def _numbers(dtype: str) -> np.ndarray[Any, Any]:
    """The numbers of an 8-bit format by their bits, float32."""
    return np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)


def read(x: Array) -> Array:
    """Stored numbers in float32, by their bits: of conversions there and back XLA may make none,
    since more precision is allowed (`xla_allow_excess_precision`)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return jnp.asarray(_numbers(x.dtype.name))[bits.astype(jnp.int32)]


def quantised(x: Array, dtype: str) -> Array:
    """Numbers in an 8-bit format: what is out of range becomes the largest finite one."""
    largest = largest_of(dtype)
    return jnp.clip(x, -largest, largest).astype(dtype)


def largest(x: Array, rows: Array | None) -> Array:
    """The largest magnitude of an array, float32 [1]; 0 of an empty one. rows: a broadcast of it,
    where its numbers count; what others hold, NaN too, does not."""
    x = x if rows is None else jnp.where(rows, x, jnp.zeros_like(x))
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32).reshape(1)


def current_scale(amax: Array, dtype: str, power_of_two: bool, epsilon: float) -> Array:
    """Scales of arrays by their own largest magnitudes, of at least epsilon, float32; 1 where there
    is none. power_of_two: the largest one that is not above it instead."""
    amax = jnp.maximum(amax, epsilon) if epsilon else amax
    scale = delayed_scale(amax, dtype, 1.0, 0)
    return power_of_two_below(scale) if power_of_two else scale


def delayed_scale(amax: Array, dtype: str, before: Array | float, margin: int) -> Array:
    """Scales by which arrays with these largest magnitudes fill an 8-bit format but for `margin`
    binades, float32; `before` where a magnitude is 0, infinite or NaN."""
    low, high = 2.0**-LARGEST_EXPONENT, 2.0**LARGEST_EXPONENT
    usable = (amax > 0) & (amax < jnp.inf)
    return jnp.where(usable, jnp.clip(largest_of(dtype) / amax * 2.0**-margin, low, high), before)


def power_of_two_below(x: Array) -> Array:
    """The largest powers of two that are not above these numbers, float32, within the exponents of
    scales; 1 for those that are not positive and finite."""
    usable = (x > 0) & (x < jnp.inf)
    _, exponent = jnp.frexp(jnp.where(usable, x, 1.0))
    exponent = jnp.clip(exponent - 1, -LARGEST_EXPONENT, LARGEST_EXPONENT)
    return jnp.where(usable, jnp.ldexp(jnp.float32(1.0), exponent), 1.0)


def scaled(x: Array, dtype: str, scale: Array) -> Array:
    """An array in 8 bits, multiplied by its scale, [1], in float32."""
    return quantised(x.astype(jnp.float32) * scale, dtype)
