"""The backward of FP8 attention in plain jax.numpy: what `attngen.reference.fp8_backward` means.

Where dO has 8 bits, normalised weights and dS are stored in 8 bits, too; where it has 16, neither
is: these are the gradients of 16 bits that an FP8 forward has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from ...call.fp8_checks import BACKWARD_SCALES
from ...call.fp8_scales import KEPT_SCALES, scale_of_weights
from ...call.numbers import Arguments
from ...call.table import CARRIERS, GRADIENT_OF, SCALES
from ...call.tensors import FP8
from ...spec import layouts
from . import reference
from .fp8 import by_rows, is_per_token, largest_of, quantised, read
from .places import Carriers, as_rows, placed
from .reference import Attention

Operands = Mapping[str, "Array | None"]
_DESCALES = {"o": "descale_o", "d_o": "descale_do"}
_ALL_SCALES = (*SCALES, *BACKWARD_SCALES)


def has_16_bits(given: Operands) -> bool:
    """Whether operands in 8 bits have gradients in 16: their dO is wider."""
    return _there(given, "q").dtype.name in FP8 and _there(given, "d_o").dtype.name not in FP8


def _there(given: Operands, name: str) -> Array:
    found = given[name]
    assert found is not None  # the form has it
    return found


def widened(given: Operands, arguments: Arguments) -> dict[str, Array | None]:
    """The operands of the 16-bit backward that the one of an FP8 forward stands for: those of the
    output's dtype, a bias among them, and no scales."""
    dtype = _there(given, "o").dtype
    wide = _dequantised(given, layouts.parse(arguments.layout))
    if (bias := given["bias"]) is not None:
        wide["bias"] = bias
    found = {**given, **{name: x.astype(dtype) for name, x in wide.items()}}
    return {name: None if name in _ALL_SCALES else x for name, x in found.items()}


def _dequantised(given: Operands, layout: layouts.Layout) -> dict[str, Array]:
    """The carriers that there are as the numbers that they stand for, float32."""
    parts: dict[str, list[Array]] = {}
    places: dict[str, int] = {}
    for name in CARRIERS:
        carrier, axis, _ = layout.home(name)
        axes, descale = layouts.axes_of(layout, carrier), given[f"descale_{name}"]
        if descale is not None and is_per_token(descale):
            factor = by_rows(descale, axes)
        else:
            factor = (jnp.ones(1) if descale is None else descale).reshape([1] * len(axes))
        parts.setdefault(carrier, []).append(factor)
        places[carrier] = axis or 0
    found = {}
    for carrier, factors in parts.items():
        x, place = read(_there(given, carrier)), places[carrier]
        (factor, *others) = factors
        factor = jnp.concatenate(factors, place) if others else factor
        found[carrier] = x * factor.astype(x.dtype)
    return found


def backward(given: Operands, arguments: Arguments) -> dict[str, Array]:
    """Gradients by their names, float32: dq, dk, dv in the carriers' formats, dbias and dsink where
    there are such operands.

    given: operands of the forward, its `o` and `lse`, `d_o`, `dlse`, and the backward's scales,
    None for 1; of dO in 8 bits `scale_dp` and `descale_dp` are needed.
    """
    layout = layouts.parse(arguments.layout)

    def rows_of(wide: dict[str, Array]) -> tuple[Array, Array, Array]:
        found = _placed(layout, wide, given)
        return found.q, found.k, found.v

    wide = _dequantised(given, layout)
    _, pull_rows = jax.vjp(rows_of, wide)
    call = Attention(given, arguments, _placed(layout, wide, given))
    *rows, learned = _gradients(_Rows.of(call, layout))
    (carried,) = pull_rows(tuple(rows))
    return {GRADIENT_OF[name]: x for name, x in {**carried, **learned}.items()}


def _placed(layout: layouts.Layout, carriers: Operands, given: Operands) -> Carriers:
    """Q, K and V by rows, zero where these belong to no sequence."""
    q, k, v = (carriers.get(name) for name in CARRIERS)
    return placed(layout, *reference.unpacked(layout, q, k, v), given)


@dataclass(frozen=True)
class _Rows:
    """A backward by rows, float32: the call of dequantised numbers; d_o [n, rows, h_q, d_v]; lse
    and delta, rowsum(dO ∘ O) − dLSE, [n, h_q, rows]."""

    call: Attention
    d_o: Array
    lse: Array
    delta: Array

    @classmethod
    def of(cls, call: Attention, layout: layouts.Layout) -> _Rows:
        """The rows of a call with its results and their gradients among its operands."""
        given, used = call.operands, call.carriers.of_q.used
        d_o, o = (_of_q(layout, given, name) for name in ("d_o", "o"))
        d_o = jnp.where(used[:, :, None, None], d_o, 0)  # others may hold anything
        delta = jnp.where(used[:, :, None], (d_o * o).sum(-1), 0).transpose(0, 2, 1)
        lse, dlse = _there(given, "lse"), given["dlse"]
        if layout.q_format == "thd":
            lse, dlse = lse[None], None if dlse is None else dlse[None]
        if dlse is not None:
            delta = delta - jnp.where(used[:, None, :], dlse, 0)
        return cls(call, d_o, lse, delta)

    @property
    def group(self) -> int:
        """Query heads that share one of K and V."""
        return int(self.d_o.shape[2] // self.call.carriers.k.shape[2])

    def of_q(self, x: Array) -> Array:
        """K or V with a head for each of Q's."""
        return jnp.repeat(x, self.group, axis=2)

    def of_kv(self, x: Array) -> Array:
        """Sums over the query heads that share one of K and V."""
        n, rows, heads, d = x.shape
        return x.reshape(n, rows, heads // self.group, self.group, d).sum(3)


def _of_q(layout: layouts.Layout, given: Operands, name: str) -> Array:
    """O or dO by rows, dequantised."""
    x, descale = _there(given, name), given[_DESCALES[name]]
    wide = read(x) if x.dtype.name in FP8 else x.astype(jnp.float32)
    wide = as_rows(wide, layout.q_format)
    return wide if descale is None else wide * descale


def _gradients(x: _Rows) -> tuple[Array, Array, Array, dict[str, Array]]:
    """dQ, dK and dV by rows, and those of learned operands by the operands' names."""
    call, q, given = x.call, x.call.carriers.q, x.call.operands
    k, v = x.of_q(call.carriers.k), x.of_q(call.carriers.v)
    seen = reference.seen(call)
    products = _product("nihd,njhd->nhij", q, k)
    learned = {} if (bias := given["bias"]) is None else {"bias": bias}

    def scores(products: Array, learned: dict[str, Array]) -> Array:
        changed = Attention({**given, **learned}, call.arguments, call.carriers)
        return jnp.where(seen, reference.scores(changed, products, seen), -jnp.inf)

    s, pull = jax.vjp(scores, products, learned)
    rows_seen = x.lse > -jnp.inf
    lse = jnp.where(rows_seen, x.lse, 0)[..., None]
    p = jnp.where(rows_seen[..., None], jnp.exp(s - lse), 0)
    keep = _keep_factors(call, p)
    d_s = p * (keep * _product("nihd,njhd->nhij", x.d_o, v) - x.delta[..., None])
    d_products, found = pull(d_s)
    if (sink := given["sink"]) is not None:
        of_sink = jnp.exp(sink.astype(p.dtype)[None, :, None] - x.lse) * x.delta
        found["sink"] = -jnp.where(rows_seen, of_sink, 0).sum((0, 2))
    p, d_products = _stored(call, p * keep, d_products)
    dq = _product("nhij,njhd->nihd", d_products, k)
    dk = x.of_kv(_product("nhij,nihd->njhd", d_products, q))
    dv = x.of_kv(_product("nhij,nihd->njhd", p, x.d_o))
    return dq, dk, dv, found


def _product(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest")


def _keep_factors(call: Attention, p: Array) -> Array:
    """Factors of the weights under dropout: 0 of dropped ones."""
    if not call.arguments.dropout_p > 0:
        return jnp.ones((), p.dtype)
    return reference.dropped(call, jnp.ones_like(p))


def _stored(call: Attention, p: Array, d_products: Array) -> tuple[Array, Array]:
    """Weights and dS as their stored numbers stand for them, where dO has 8 bits."""
    given = call.operands
    kind = _there(given, "d_o").dtype.name
    if kind not in FP8:
        return p, d_products
    dtype, scale, descale = _there(given, "q").dtype.name, given["scale_s"], given["descale_s"]
    if scale is None or descale is None:
        scale = jnp.float32(scale_of_weights(largest_of(dtype), call.arguments.dropout_p))
        descale = 1 / scale
    p = read(quantised(p * scale, dtype)) * descale
    up, down = _there(given, "scale_dp"), _there(given, "descale_dp")
    return p, read(quantised(d_products * up, kind)) * down


def unit_of_weights(given: Operands, dropout_p: float) -> Array | float | None:
    """By what kernels multiply weights to store them, which is in the LSE that they leave; None
    where these have more than 8 bits."""
    dtype, scale_s = _there(given, "q").dtype.name, given["scale_s"]
    if dtype not in FP8:
        return None
    if scale_s is None:
        return scale_of_weights(largest_of(dtype), dropout_p)
    return jnp.clip(scale_s, *KEPT_SCALES)
