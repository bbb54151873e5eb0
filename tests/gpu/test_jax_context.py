"""Sequences over an axis of JAX: in 8 bits, and rows of segments whose numbers are traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .test_jax import carriers, device, jax, jnp

__all__ = ["device"]  # a fixture
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["RING", "ALL_GATHER"])
def test_sequences_over_an_axis_are_one_call_in_8_bits(strategy: str) -> None:
    """Elements of a vmap with a named axis stand for devices."""
    from attngen.jax import CPStrategy, Float8CurrentScaling, context_attention, fp8_attention

    from attngen.call.context.order import Order

    given, recipe = carriers(1, 4, 2, 256, 256, 64), Float8CurrentScaling()
    order = Order("dual_chunk", 2)
    held = {n: jnp.stack([x[:, np.array(order.shard(r, [256]))] for r in (0, 1)])
            for n, x in given.items()}  # fmt: skip
    words = {"mask": "causal", "recipe": recipe, "backend": "cuda"}

    def spread(held: dict[str, Any]) -> Any:
        return context_attention(**held, **words, axis="cp", strategy=CPStrategy[strategy])

    def gradients(call: Any) -> Any:
        def loss(given: dict[str, Any]) -> Any:
            out = call(given)
            return (out.astype(jnp.float32) ** 2).sum(), {"o": out}

        return jax.grad(loss, has_aux=True)

    made, found = jax.jit(jax.vmap(gradients(spread), axis_name="cp"))(held)
    one, wanted = jax.jit(gradients(lambda given: fp8_attention(**given, **words)))(given)
    back = np.array(order.unshard([256]))
    for name, x in {**wanted, **one}.items():
        parts = np.asarray({**found, **made}[name].astype("float32"))
        whole, x = np.take(np.concatenate([*parts], 1), back, 1), np.asarray(x.astype("float32"))
        assert np.sqrt(((whole - x) ** 2).mean()) <= 0.03 * np.sqrt((x**2).mean()), name


def test_segments_over_an_axis_are_those_of_whole_rows() -> None:
    """In stripes: a device's tokens are every second one of each row."""
    from attngen.jax import (
        AttnBiasType,
        AttnMaskType,
        AttnSoftmaxType,
        CPStrategy,
        QKVLayout,
        SequenceDescriptor,
        fused_attn,
    )

    ids = np.repeat([[1, 2, 3, 0], [1, 1, 2, 0]], 64, axis=1).astype(np.int32)
    places = np.array([[(row[:n] == row[n]).sum() for n in range(256)] for row in ids], np.int32)
    given = tuple(carriers(2, 4, 2, 256, 256, 64).values())

    def gradients(**axis: Any) -> Any:
        def loss(given: Any, ids: Any, places: Any) -> Any:
            out = fused_attn(
                *(given, None, SequenceDescriptor.from_segment_ids_and_pos(ids, places), None),
                *(AttnBiasType.NO_BIAS, AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.THD_THD_THD),
                *(AttnSoftmaxType.VANILLA_SOFTMAX, 0.125, 0.0, True, 3),
                **axis,
            )
            return (out.astype(jnp.float32) ** 2).sum(), out

        return jax.grad(loss, has_aux=True)

    axis = {"context_parallel_axis": "cp", "context_parallel_strategy": CPStrategy.RING}
    wanted = jax.tree.leaves(jax.jit(gradients())(given, jnp.asarray(ids), jnp.asarray(places)))
    held = [jax.tree.map(lambda x: jnp.stack([x[:, n::2] for n in (0, 1)]), x)
            for x in (given, jnp.asarray(ids), jnp.asarray(places))]  # fmt: skip
    found = jax.tree.leaves(jax.jit(jax.vmap(gradients(**axis), axis_name="cp"))(*held))
    for one, other in zip(found, wanted, strict=True):
        parts, other = (np.asarray(x.astype("float32")) for x in (one, other))
        whole = np.stack([*parts], axis=2).reshape(other.shape)
        assert np.abs(whole - other).max() <= 0.03 * np.abs(other).max()
