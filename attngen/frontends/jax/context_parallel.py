"""Attention of sequences that are spread over an axis of a mesh, inside `jax.shard_map`.

Keys and values are gathered, or travel around a ring: by the plans of call/context/steps.py, each
device gets what its queries see, and computes with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...call.backend import AUTO, asked, check_backend
from ...call.context import checks as context_checks
from ...call.context.checks import AXES, Over
from ...call.context.order import AnyOrder, Order, order_of
from ...call.context.steps import Length, is_aligned
from ...call.context.visits import Bands, Visit, gathered_of, ring_of
from ...errors import SpecError
from ...results import AttentionAux
from . import calls
from .attention import SAVED_AS
from .context_function import Config, differentiable
from .context_parts import WIDE, Words
from .context_storage import SCALES, check_recipe, scales_of
from .fp8_recipes import Float8Scales
from .manual_axes import spread, varying
from .names import CPStrategy

BANDS = Bands._fields
NUMBERS = ("softmax_scale", "softcap", "dropout_p", "bias_type", "deterministic", "backend")
ARRAYS = ("bias", "attn_mask", "alibi_slopes", "sink", "rng_state", "seqused_q", "seqused_kv")
ENDS = tuple(f"cu_seqlens_{side}{end}" for side in ("q", "kv") for end in ("", "_padded"))
SERVED = (*BANDS, *NUMBERS, *ARRAYS, *ENDS, "layout", "softmax", "return_lse")
_DEVICES = Over("several devices", "device", SERVED)


class Spread(NamedTuple):
    """How sequences are spread, as `context_attention` takes it. saved_as: the name of what a call
    saves for its gradients; recipe: by which operands are stored in 8 bits, scales: its state."""

    axis: str
    strategy: CPStrategy
    order: AnyOrder
    reduce_dtype: Any
    saved_as: str
    recipe: Any = None
    scales: Any = None

    def order_of_devices(self) -> Order:
        """The order of the axis' devices. Raises: SpecError where there is none of them."""
        try:
            devices = jax.lax.axis_size(self.axis)
        except NameError as error:
            reason = f"axis={self.axis!r} is no axis of a jax.shard_map around this call"
            raise SpecError(reason) from error
        return order_of(self.order, devices)

    def is_ring(self, order: Order) -> bool:
        """Whether keys come from one device after another. Raises: SpecError where an order that
        needs it is not to have it."""
        ring = self.strategy is CPStrategy.RING
        if order.name != "striped":
            return ring
        if self.strategy is CPStrategy.ALL_GATHER:
            raise SpecError("order 'striped' has no runs of positions: use CPStrategy.RING")
        return True


def context_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis: str,
    strategy: CPStrategy = CPStrategy.DEFAULT,
    order: AnyOrder = "dual_chunk",
    reduce_dtype: Any = jnp.float32,
    **arguments: Any,
) -> Array | tuple[Array | AttentionAux | Float8Scales, ...]:
    """Attention of a device's part of the queries over the keys of all along an axis of the mesh.

    q, k, v: what a device holds of each sequence in that order, [b, s / n, h, d] of n devices in
    the default layout, [t / n, h, d] in `thd`. strategy: ALL_GATHER, or RING, where keys come from
    one device after another, those alone that are needed; RING by default in order striped. order:
    of call/context/order.py, `("striped", n)` for stripes of n positions, in which
    `reorder_causal_load_balancing` lays out arrays. reduce_dtype: of gradients in messages, beside
    operands of 16 bits.

    arguments: those of `attngen.jax.attention` that `SERVED` lists; and `recipe`, by which q, k and
    v of 16 bits are stored in 8 with scales of all devices, travel so, and have gradients made in
    16 bits, and `scales`, the state of a `DelayedScaling`, one for all devices. cu_seqlens_… are of
    the whole and known while tracing; seqused_… are of whole sequences and may be traced. bias and
    attn_mask have the device's queries and all keys, [b, h, s_q / n, s_kv]. rng_state is one for
    all devices; what is dropped does not depend on how many there are.

    Returns: the output, q's shape with d_v; with return_lse a pair with an AttentionAux, its LSE
    [b, h, s_q / n], of packed tokens [h, t / n]. Behind them, of a `DelayedScaling`, its scales
    with the call's magnitudes noted, those of all devices.

    Raises: SpecError with every violation, where this is no call inside `jax.shard_map` over that
    axis, and as `attngen.jax.attention`.
    """
    own = {name: arguments.pop(name, None) for name in ("recipe", "scales")}
    spread_over = Spread(axis, strategy, order, reduce_dtype, SAVED_AS, **own)
    return attend_spread(q, k, v, spread_over, arguments)


def attend_spread(
    q: Array, k: Array, v: Array, over: Spread, arguments: Mapping[str, Any]
) -> Array | tuple[Array | AttentionAux | Float8Scales, ...]:
    """`context_attention` of a way to spread that is already a value. Raises: as that."""
    given = {name: x for name, x in arguments.items() if x is not None}
    if reasons := [*_violations(q, k, v, given)]:
        raise SpecError(reasons)
    if over.recipe is not None or over.scales is not None:
        check_recipe(over.recipe, over.scales, q)
    order = over.order_of_devices()
    layout = given.get("layout", "bshd")
    packed = layout == "thd"
    q, k, v = ((x[None] if packed else x.transpose(AXES[layout])) for x in (q, k, v))
    stands_for = "" if over.recipe is None else q.dtype.name
    words = replace(_words(given, packed), stored=stands_for)
    operands = _operands(q, k, v, given, words)
    lengths = _lengths(given, q.shape[1] * order.ranks, k.shape[1] * order.ranks)
    by_position = words.placed or any(x in operands for x in ("bias", "attn_mask", *_USED))
    bands = Bands(**{name: given[name] for name in BANDS if name in given})
    ring = over.is_ring(order)
    config = Config(
        axis=over.axis,
        order=order,
        rooms=tuple([x.room_kv for x in lengths]),
        visits=_visits(ring, order, lengths, bands, by_position),
        gathers=not ring,
        unused=_unused(order, [(x.room_q, x.q) for x in lengths]),
        unused_kv=_unused(order, [(x.room_kv, x.kv) for x in lengths]),
        words=words,
        travels=jnp.dtype(over.reduce_dtype).name,
        saved_as=over.saved_as,
        recipe=over.recipe,
    )
    maxima, known = None, over.scales
    if over.recipe is not None:
        maxima = config.maxima(operands)
        before = None if known is None else jax.lax.stop_gradient(known.scale)
        operands[SCALES] = scales_of(over.recipe, maxima, before)
    axes = varying([*operands.values()])
    out, lse = differentiable(config)({name: spread(x, axes) for name, x in operands.items()})
    if packed:
        (out,), (lse,) = out, lse
    else:
        out = out.transpose(AXES[layout])
    made = (out, *([AttentionAux(lse=lse)] if given.get("return_lse") else []))
    noted = [] if known is None or maxima is None else [known.noted(maxima)]
    return (*made, *noted) if len(made) + len(noted) > 1 else out


_USED = ("seqused_q", "seqused_kv")


def _violations(q: Array, k: Array, v: Array, given: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that calls over several devices do not take."""
    yield from context_checks.violations((q, k, v), given, _DEVICES)
    mask, layout = given.get("mask", "none"), given.get("layout", "bshd")
    used = any(name in given for name in _USED)
    if used and isinstance(mask, str) and is_aligned(mask, given.get("bottom_right")):
        yield "a diagonal from the bottom right beside seqused_…: pass cu_seqlens_… in layout thd"
    of_format = _USED if layout == "thd" else ENDS
    for name in sorted({*of_format} & {*given}):
        yield f"{name} beside layout={layout!r} is not served over several devices"
    for name in sorted({*ENDS} & {*given}):
        if isinstance(given[name], jax.core.Tracer):
            yield f"{name} needs numbers that are known while tracing: pass NumPy's, or ints"
    if given.get("dropout_p", 0) > 0 and "rng_state" not in given:
        yield "dropout_p needs rng_state, the same on all devices"


def _words(given: Mapping[str, Any], packed: bool) -> Words:
    """Arguments of all parts. Raises: SpecError where there is no such backend."""
    backend = asked(given.get("backend", AUTO))
    check_backend(backend)
    found = {name: given[name] for name in NUMBERS if name in given} | {"backend": backend}
    placed = _has_alibi(given) or given.get("dropout_p", 0) > 0
    if found.get("bias_type") == "alibi":
        del found["bias_type"]
    return Words(**found, placed=placed, packed=packed)


def _has_alibi(given: Mapping[str, Any]) -> bool:
    """Whether scores have ALiBi's term."""
    slopes = given.get("alibi_slopes")
    asked = slopes is not None and slopes is not False
    return asked or given.get("bias_type") == "alibi"


def _operands(
    q: Array, k: Array, v: Array, given: Mapping[str, Any], words: Words
) -> dict[str, Array]:
    """Arrays of a call by their names: biases and masks with four axes, slopes and a sink float32,
    of dropout the words of its state."""
    found = {"q": q, "k": k, "v": v}
    found |= {name: jnp.asarray(given[name]) for name in ("bias", "attn_mask") if name in given}
    for name in {"bias", "attn_mask"} & {*found}:
        found[name] = found[name].reshape((1,) * (4 - found[name].ndim) + found[name].shape)
    found |= {name: jnp.asarray(given[name]) for name in _USED if name in given}
    heads, wide = q.shape[2], q.dtype if q.dtype.name in WIDE else jnp.dtype("float32")
    if _has_alibi(given):
        slopes = given.get("alibi_slopes")
        own = calls.default_slopes(heads) if slopes is None or slopes is True else slopes
        found["alibi_slopes"] = jax.lax.stop_gradient(jnp.asarray(own))
    if words.dropout_p > 0:
        found["rng_state"] = calls.words_of_state(given["rng_state"])
    softmax = given.get("softmax", "vanilla")
    if softmax == "off_by_one":
        found["sink"] = jnp.zeros(heads, wide)
    elif softmax == "learnable":
        found["sink"] = jnp.asarray(given["sink"])
    return found


def _lengths(given: Mapping[str, Any], tokens_q: int, tokens_kv: int) -> tuple[Length, ...]:
    """Lengths of packed sequences, or of all of a batch. Raises: SpecError where rooms of packed
    ones are not all tokens."""
    if given.get("layout") != "thd":
        return (Length(tokens_q, tokens_kv, tokens_q, tokens_kv),)
    tokens = tokens_q, tokens_kv
    return context_checks.packed_lengths(given, tokens, _numbers, "devices")


def _numbers(x: Any) -> list[int]:
    found: list[int] = np.asarray(x).tolist()
    return found


def _visits(
    ring: bool, order: Order, lengths: tuple[Length, ...], bands: Bands, by_position: bool
) -> tuple[Visit, ...]:
    """The plan of all devices. Raises: SpecError where the order has none."""
    if not ring:
        return (gathered_of(order, lengths, bands, by_position),)
    found = ring_of(order, lengths, bands, by_position)
    if any(part.stripe > 1 for x in found for parts in x.branches for part in parts):
        raise SpecError(
            f"stripe={order.stripe}: under a causal mask parts compare whole stripes, which no "
            "kernel does. Use stripes of 1, or another order."
        )
    return found


def _unused(order: Order, sides: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Tokens that belong to no sequence, of each device. sides: room and length of sequences."""
    begins = [*accumulate([room // order.ranks for room, _ in sides], initial=0)]

    def of(rank: int) -> Iterator[int]:
        for begin, (room, length) in zip(begins, sides, strict=False):
            yield from range(begin + order.used(rank, room, length), begin + room // order.ranks)

    return tuple([tuple(of(rank)) for rank in range(order.ranks)])
