"""Sequences over an axis of JAX in 8 bits: kernels beside one call of 16-bit operands in FP8."""

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

    from attngen.call.context_order import Order

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
