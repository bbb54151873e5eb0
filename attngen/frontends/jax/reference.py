"""The definition of attention in plain jax.numpy: what runs where there are no kernels.

It computes whole score matrices in float32 (float64 of float64 operands), and means what
`attngen.reference` means, against which tests hold it. Lengths may be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...call import fragments
from ...call.dropout import drop_threshold, keep_scale
from ...call.fragments import LEARNED_SLOT, definition_of, fragments_of
from ...call.numbers import Arguments
from ...call.positions import Positions
from ...call.table import CARRIERS
from ...call.tensors import FP8
from ...fragments.features import program_named
from ...fragments.program import Program
from ...spec import layouts
from ...spec.masks import masks_of
from .callable_values import over_positions, value_of
from .dropout import random_bytes
from .fp8 import dequantised, is_per_token, stored, value_scales, weights
from .places import Carriers, placed, returned

_FARTHEST = 1 << 30  # of two positions from each other

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(jnp, name)
        for name in (
            *("abs", "ceil", "cos", "exp", "exp2", "floor", "log", "log1p", "log2", "maximum"),
            *("minimum", "pow", "sin", "sqrt", "square", "tanh", "where"),
        )
    },
    "clamp": jnp.clip,
    "erf": jax.scipy.special.erf,
    "relu": jax.nn.relu,
    "rsqrt": jax.lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
}
"""Functions that definitions of fragments call, by torch's names of them."""
ScoreMod = Callable[..., Array]


@dataclass(frozen=True)
class Attention:
    """A call as it is computed: its operands by the operations' names, its numbers, its rows, and a
    function of its scores."""

    operands: Mapping[str, Array | None]
    arguments: Arguments
    carriers: Carriers
    score_mod: ScoreMod | None = None

    @property
    def dtype(self) -> Any:
        """The dtype of scores."""
        return jnp.float64 if self.carriers.q.dtype == jnp.float64 else jnp.float32

    @property
    def places(self) -> Positions:
        """Where the first query and the first key stand in the whole."""
        words = self.arguments.positions
        return Positions.read(words) if words else Positions.of((0, 0))

    @property
    def delta(self) -> Array:
        """How far the diagonal of each row lies to the right, int32 [n, rows, 1]."""
        rows = self.carriers
        if self.arguments.positions:
            return jnp.full((1, 1, 1), self.places.diagonal, jnp.int32)
        if not self.arguments.bottom_right:
            return jnp.zeros((1, 1, 1), jnp.int32)
        return rows.of_row(rows.of_kv.lengths - rows.of_q.lengths)

    @property
    def positions(self) -> dict[str, Array]:
        """Positions of each pair, by the names b, h, i and j that functions know, int32 broadcasts
        of [n, h, rows, columns]."""
        rows = self.carriers
        return {
            "b": rows.of_q.sequence[:, None, :, None],
            "h": jnp.arange(rows.q.shape[2], dtype=jnp.int32)[None, :, None, None],
            "i": rows.of_q.position[:, None, :, None],
            "j": rows.of_kv.position[:, None, None, :],
        }

    def spread(self, x: Array) -> Array:
        """A broadcast of [b, h, s_q, s_kv] as one of [n, h, rows, columns]."""
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        rows = self.carriers
        if not rows.packed:
            return x[:, :, : rows.q.shape[1], : rows.k.shape[1]]
        batches, _, queries, keys = x.shape
        b = jnp.minimum(rows.of_q.sequence, batches - 1)[:, :, None]
        i = jnp.minimum(rows.of_q.position, queries - 1)[:, :, None]
        j = jnp.minimum(rows.of_kv.position, keys - 1)[:, None, :]
        return jnp.moveaxis(x.transpose(0, 2, 3, 1)[b, i, j], -1, 1)


def forward(
    operands: Mapping[str, Array | None],
    arguments: Arguments,
    score_mod: ScoreMod | None = None,
) -> dict[str, Array]:
    """Results of a call by the operations' names: `o` in Q's format, `lse` float32 [b, h, s] or
    [h, t] (float64 of float64 operands), and the maxima that it asks for.

    operands: those of `table.INPUTS`, None for none; of dropout the words of its state, uint32 [4].
    score_mod: of numbers, a score and its b, h, i and j.
    """
    layout = layouts.parse(arguments.layout)
    q, k, v = unpacked(layout, operands["q"], operands["k"], operands["v"])
    call = Attention(operands, arguments, placed(layout, q, k, v, operands), score_mod)
    products, values = _products(call)
    visible = seen(call)
    s = jnp.where(visible, scores(call, products, visible), -jnp.inf)
    p, lse = _softmax(call, s)
    if arguments.dropout_p > 0:
        p = dropped(call, p)
    out = jnp.einsum("nhij,njhd->nihd", p, values, precision="highest")
    used = call.carriers.of_q.used
    out = jnp.where(used[:, :, None, None], out, 0)
    lse = jnp.where(used[:, None, :], lse, -jnp.inf)
    found = {"o": stored(returned(out, layout.q_format), operands, arguments), "lse": lse}
    if layout.q_format == "thd":
        found["lse"] = lse.reshape(lse.shape[1:])
    s = jax.lax.stop_gradient(s)
    if arguments.amax:
        found["amax_s"] = jnp.any(visible & (s > -jnp.inf)).astype(lse.dtype)[None]
        found["amax_o"] = jnp.max(jnp.abs(out), initial=0.0)[None]
    if arguments.max_logit:
        found["max_logit"] = jnp.max(s, axis=(0, 2, 3), initial=-jnp.inf)
    return found


def unpacked(layout: layouts.Layout, q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    """Q, K and V of checked operands, each a tensor of its own."""
    places = {name: layout.home(name) for name in "qkv"}
    carriers = {"q": q, "k": k, "v": v}
    found = []
    for carrier, axis, place in places.values():
        x = carriers[carrier]
        found.append(jnp.take(x, place, axis=axis) if axis else x)
    q, k, v = found
    return q, k, v


def _products(call: Attention) -> tuple[Array, Array]:
    """Q Kᵀ, [n, h, rows, columns], and V [n, columns, h, d] in the dtype of scores."""
    rows, dtype = call.carriers, call.dtype
    scales = {name: call.operands[f"descale_{name}"] for name in CARRIERS}
    if is_per_token(scales["v"]):  # in the weights before they are stored
        scales["v"] = None
    q, k, v = (
        dequantised(x, scales[name], side, dtype)
        for name, x, side in (
            *(("q", rows.q, rows.of_q), ("k", rows.k, rows.of_kv)),
            ("v", rows.v, rows.of_kv),
        )
    )
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    return jnp.einsum("nihd,njhd->nhij", q, k, precision="highest"), v


def seen(call: Attention) -> Array:
    """Keys that each query sees, bool, a broadcast of [n, h, rows, columns]."""
    rows, arguments = call.carriers, call.arguments
    found = rows.together
    diagonal = rows.of_q.position[:, :, None] + call.delta
    j = rows.of_kv.position[:, None, :]
    causal = "causal" in masks_of(arguments.mask).fragments
    right = 0 if causal else arguments.window_right
    if arguments.window_left >= 0:
        found = found & (j >= diagonal - min(arguments.window_left, _FARTHEST))
    if right >= 0:
        found = found & (j <= diagonal + min(right, _FARTHEST))
    found = found[:, None]
    for each in fragments_of(arguments.mask, None):
        if each.name != "causal":
            found = found & _applied(call, each)
    if (mask := call.operands["attn_mask"]) is not None:
        found = found & call.spread(mask)
    return found


def scores(call: Attention, products: Array, seen: Array) -> Array:
    """Scores before what is hidden is; hidden ones are 0 on the way, so that no term makes NaN of
    what a masked position holds."""
    arguments, operands = call.arguments, call.operands
    s = jnp.where(seen, products, 0)
    bias = operands["bias"]
    if bias is not None:
        bias = jnp.where(seen, call.spread(bias).astype(s.dtype), 0)
        if arguments.bias_type == "pre_scale":
            s, bias = s + bias, None
    scale = arguments.softmax_scale
    s = s * (1 / math.sqrt(call.carriers.q.shape[-1]) if scale is None else scale)
    if arguments.softcap > 0:
        s = arguments.softcap * jnp.tanh(s / arguments.softcap)
    for each in fragments_of("none", arguments.score_mod):
        s = _applied(call, each, s)
    if call.score_mod is not None:
        s = over_positions(call.score_mod, s, *call.positions.values()).astype(s.dtype)
    if bias is not None:
        s = s + bias
    if (slopes := operands["alibi_slopes"]) is not None:
        rows = call.carriers
        i = rows.of_q.position[:, :, None] + call.delta
        distance = jnp.abs(i - rows.of_kv.position[:, None, :]).astype(s.dtype)
        s = s - _by_head(call, slopes).astype(s.dtype) * distance[:, None]
    return s


def _by_head(call: Attention, x: Array) -> Array:
    """A tensor [h] or [b, h] as a broadcast of [n, h, rows, 1]."""
    if x.ndim == 1:
        return x[None, :, None, None]
    return jnp.moveaxis(x[call.carriers.of_q.sequence], -1, 1)[..., None]


def _applied(call: Attention, fragment: Any, score: Array | None = None) -> Array:
    """A fragment's definition, of positions, and of scores where it has these."""
    if score is not None and (program := program_named(fragment.name)) is not None:
        return _of_program(call, program, score)
    rows = call.carriers
    known: dict[str, Any] = {
        "i": rows.of_q.position[:, None, :, None],
        "j": rows.of_kv.position[:, None, None, :],
        "delta": call.delta[:, None],
        "q_len": rows.of_row(rows.of_q.lengths)[:, None],
        "kv_len": rows.of_row(rows.of_kv.lengths)[:, None],
    }
    if score is not None:
        known["score"] = score
    own = {each.name for each in fragment.operands}
    for each in fragments.operands_of(call.arguments.mask, call.arguments.score_mod):
        if each.name not in own or each.fragment.name != fragment.name:
            continue
        x = call.operands.get(each.slot)
        if x is None:
            word = call.arguments.numbers.split()[each.number]
            known[each.name] = fragments.as_number(each.operand, word)
        elif each.operand.domain == "sequence":
            known[each.name] = rows.of_row(x)[:, None]
        else:
            known[each.name] = _by_head(call, x)
    made: Array = definition_of(fragment, FUNCTIONS)(**known)
    return made


def _of_program(call: Attention, program: Program, score: Array) -> Array:
    """A traced function's scores."""
    own = fragments.operands_of("none", call.arguments.score_mod)
    words = call.arguments.numbers.split()
    held = [each for each in own if each.slot and each.slot != LEARNED_SLOT]
    captures = [x for each in held if (x := call.operands.get(each.slot)) is not None]
    if (stands := call.operands.get(LEARNED_SLOT)) is not None:  # zeros, whose gradient is theirs
        start = 0
        for place in program.learned_captures:
            x = captures[place]
            captures[place] = x + stands[start : start + x.size].reshape(x.shape)
            start += x.size
    numbers = [fragments.as_number(x.operand, words[x.number]) for x in own if x.number >= 0]
    return value_of(program, captures, numbers, {"s": score, **call.positions})


def _softmax(call: Attention, s: Array) -> tuple[Array, Array]:
    """Probabilities [n, h, rows, columns], and log-sum-exp [n, h, rows]."""
    sink = _sink(call, s)
    if call.carriers.q.dtype.name in FP8:
        descale = call.operands["descale_v"]
        if descale is None or not is_per_token(descale):
            return weights(call.operands, s, sink)
        return weights(call.operands, s, sink, value_scales(descale, call.carriers.of_kv, s))
    maximum = jnp.maximum(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf), sink)
    maximum = jax.lax.stop_gradient(jnp.where(maximum == -jnp.inf, 0, maximum))
    exps = jnp.exp(s - maximum)
    total = exps.sum(-1, keepdims=True) + jnp.exp(sink - maximum)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, maximum + jnp.log(total))
    return exps / total, lse.reshape(lse.shape[:-1])


def _sink(call: Attention, s: Array) -> Array:
    """The score of the sink, [1, h, 1, 1]; −∞ where a softmax has none."""
    if (sink := call.operands["sink"]) is not None:
        return sink.astype(s.dtype)[None, :, None, None]
    value = 0.0 if call.arguments.softmax == "off_by_one" else -jnp.inf
    return jnp.full((1, s.shape[1], 1, 1), value, s.dtype)


def dropped(call: Attention, p: Array) -> Array:
    """Probabilities after dropout."""
    rows, arguments = call.carriers, call.arguments
    state = call.operands["rng_state"]
    assert state is not None  # checked with the call
    first, of_q, of_kv = call.places, rows.of_q, rows.of_kv
    heads = jnp.arange(first.head, first.head + p.shape[1])
    i, j = of_q.position + first.query, of_kv.position + first.key
    drawn = random_bytes(state, of_q.sequence + first.sequence, heads, i, j)
    keep = drawn >= drop_threshold(arguments.dropout_p)
    return jnp.where(keep, p * keep_scale(arguments.dropout_p), 0)
