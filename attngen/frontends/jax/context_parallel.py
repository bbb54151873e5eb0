"""Attention of sequences that are spread over an axis of a mesh, inside `jax.shard_map`.

Keys and values are gathered, or travel around a ring. Either way each device attends with its own
queries, of lengths that say how many keys it sees: one program serves all devices, and JAX makes
the gradients, whose parts are scattered or travel back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...errors import SpecError
from .attention import attention
from .load_balancing import inverse_reorder_causal_load_balancing
from .names import CPStrategy, ReorderStrategy

SERVED = ("mask", "window", "softmax_scale", "softcap", "deterministic", "backend")
MASKS = ("none", "causal")


@dataclass(frozen=True)
class Parts:
    """How sequences are spread: over an axis of so many devices, and whether each has a pair of
    chunks, from the front and from the end. options: arguments of attention, but for the mask."""

    axis: str
    devices: int
    balanced: bool
    options: Mapping[str, Any]

    def chunks(self, x: Array) -> list[tuple[Array, Array]]:
        """Chunks of this device's part, each with its number among those of the sequence."""
        rank = jax.lax.axis_index(self.axis)
        if not self.balanced:
            return [(x, rank)]
        first, last = jnp.split(x, 2, axis=1)
        return [(first, rank), (last, 2 * self.devices - 1 - rank)]

    def attend(self, q: Array, k: Array, v: Array, mask: str, keys: Array | None = None) -> Any:
        """The output and the LSE of queries that see so many keys, all of them without a number."""
        lengths = {}
        if keys is not None:
            lengths["seqused_kv"] = jnp.broadcast_to(keys.astype(jnp.int32), k.shape[:1])
        found = attention(q, k, v, mask=mask, **lengths, **self.options, return_lse=True)
        assert isinstance(found, tuple)  # by-products are asked for
        out, aux = found
        return out, aux.lse


def context_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis: str,
    strategy: CPStrategy = CPStrategy.DEFAULT,
    balanced: bool = False,
    **options: Any,
) -> Array:
    """Attention of each device's part of q, k and v, bshd, along an axis of the mesh.

    q, k, v: [b, s / n, h, d] of n devices, in the order of their sequences, or, where `balanced`,
    as `reorder_causal_load_balancing` orders them by DualChunkSwap. strategy: ALL_GATHER, which is
    the default, or RING, which takes no window. options: arguments of `attention` among `SERVED`,
    and of the masks `none` and `causal`.

    Returns: the output of q's rows, [b, s / n, h, d_v].

    Raises: SpecError where this is no call inside `jax.shard_map` over that axis, and for other
    arguments.
    """
    ring, mask = strategy is CPStrategy.RING, options.pop("mask", "none")
    options = {name: x for name, x in options.items() if x is not None}
    reasons = [f"{name} is not served over several devices" for name in {*options} - {*SERVED}]
    if mask not in MASKS:
        reasons.append(f"mask={mask!r}: over several devices it is one of {', '.join(MASKS)}")
    if options.get("window", (-1, -1)) != (-1, -1) and (ring or mask != "causal"):
        reasons.append("a window needs mask='causal' and strategy=CPStrategy.ALL_GATHER")
    if q.shape[1] != k.shape[1]:
        reasons.append(f"q and k need parts of one length; got {q.shape[1]} and {k.shape[1]}")
    if balanced and q.shape[1] % 2:
        reasons.append(f"balanced parts are pairs of chunks; got {q.shape[1]} positions")
    if reasons:
        raise SpecError(sorted(reasons))
    try:
        devices = jax.lax.axis_size(axis)
    except NameError as error:
        reason = f"axis={axis!r} is no axis of a jax.shard_map around this call"
        raise SpecError(reason) from error
    parts = Parts(axis, devices, balanced, options)
    return (_around(parts, q, k, v, mask) if ring else _gathered(parts, q, k, v, mask)).astype(
        q.dtype
    )


def _gathered(parts: Parts, q: Array, k: Array, v: Array, mask: str) -> Array:
    """Each chunk of queries sees all keys up to its own end."""
    k, v = (jax.lax.all_gather(x, parts.axis, axis=1, tiled=True) for x in (k, v))
    if parts.balanced:
        swap = ReorderStrategy.DualChunkSwap
        k, v = (
            inverse_reorder_causal_load_balancing(x, swap, parts.devices, 1) for x in (k, v)
        )
    found = []
    for chunk, number in parts.chunks(q):
        if mask == "causal":
            keys = (number + 1) * chunk.shape[1]
            out, _ = parts.attend(chunk, k, v, "causal_bottom_right", keys)
        else:
            out, _ = parts.attend(chunk, k, v, mask)
        found.append(out)
    return jnp.concatenate(found, axis=1)


def _around(parts: Parts, q: Array, k: Array, v: Array, mask: str) -> Array:
    """Keys come by, one device's after another's: each chunk of queries sees those that are not
    behind it, and parts are joined by their LSE."""
    made: list[list[tuple[Array, Array]]] = []
    onwards = [(rank, (rank + 1) % parts.devices) for rank in range(parts.devices)]
    for step in range(parts.devices):
        made.append(_of_step(parts, step, q, k, v, mask))
        if step < parts.devices - 1:
            k, v = (jax.lax.ppermute(x, parts.axis, onwards) for x in (k, v))
    return jnp.concatenate([_joined(each) for each in zip(*made, strict=True)], axis=1)


def _of_step(
    parts: Parts, step: int, q: Array, k: Array, v: Array, mask: str
) -> list[tuple[Array, Array]]:
    """Outputs and LSEs of each chunk of queries beside the keys of the device so many before."""
    if mask != "causal":
        return [parts.attend(chunk, k, v, mask) for chunk, _ in parts.chunks(q)]
    rank = jax.lax.axis_index(parts.axis)
    earlier = rank >= step  # else the keys are of a device behind this one
    if not parts.balanced:
        if step == 0:
            return [parts.attend(q, k, v, mask)]
        return [parts.attend(q, k, v, "none", jnp.where(earlier, k.shape[1], 0))]
    (first, _), (last, _) = parts.chunks(q)
    half = first.shape[1]
    if step == 0:  # the end sees the front, too
        return [
            parts.attend(first, k[:, :half], v[:, :half], mask),
            parts.attend(last, k, v, "causal_bottom_right"),
        ]
    seen = jnp.where(earlier, half, 0), jnp.where(earlier, half, 2 * half)
    return [
        parts.attend(chunk, k, v, "none", keys)
        for chunk, keys in zip((first, last), seen, strict=True)
    ]


def _joined(made: tuple[tuple[Array, Array], ...]) -> Array:
    """The output of parts of its keys: [b, s, h, d] and LSE [b, h, s] each; float32."""
    outputs = jnp.stack([out.astype(jnp.float32) for out, _ in made])
    lses = jnp.stack([lse for _, lse in made])
    weights = jnp.exp(lses - jax.nn.logsumexp(lses, axis=0))
    return (outputs * weights.swapaxes(-1, -2)[..., None]).sum(0)
