"""Sequences over several devices: gathered and around a ring, balanced or in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen.jax import (  # noqa: E402
    CPStrategy,
    ReorderStrategy,
    attention,
    context_attention,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from attngen import SpecError  # noqa: E402

jnp = jax.numpy
DEVICES, S = 4, 32
ROWS = PartitionSpec(None, "cp")


def random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32))


ARRAYS = random(2, S, 4, 8), random(2, S, 2, 8, seed=1), random(2, S, 2, 8, seed=2)
CASES: dict[str, Any] = {
    "gathered, in order, a window": (CPStrategy.ALL_GATHER, False, {"window": (9, 0)}),
    "gathered, balanced": (CPStrategy.DEFAULT, True, {"softcap": 4.0}),
    "a ring, in order": (CPStrategy.RING, False, {}),
    "a ring, balanced": (CPStrategy.RING, True, {"softmax_scale": 0.2}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "balanced", "options"), CASES.values(), ids=CASES)
def test_causal_results_and_gradients_are_those_of_one_device(
    strategy: CPStrategy, balanced: bool, options: dict[str, Any]
) -> None:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), "cp")
    swap = ReorderStrategy.DualChunkSwap, DEVICES, 1

    def spread(*arrays: Any) -> Any:
        words = {"axis": "cp", "strategy": strategy, "balanced": balanced, "mask": "causal"}
        run = jax.shard_map(
            lambda q, k, v: context_attention(q, k, v, **words, **options),
            mesh=mesh,
            in_specs=ROWS,
            out_specs=ROWS,
        )
        if not balanced:
            return run(*arrays)
        out = run(*[reorder_causal_load_balancing(x, *swap) for x in arrays])
        return inverse_reorder_causal_load_balancing(out, *swap)

    dtype = jnp.bfloat16 if strategy is CPStrategy.RING and not balanced else jnp.float32

    def whole(*arrays: Any) -> Any:
        return attention(*arrays, mask="causal", **options)

    def results(function: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            out = function(*arrays)
            return (out**2).sum(), out

        arrays = [x.astype(dtype) for x in ARRAYS]
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)

    atol = 1e-4 if dtype == jnp.float32 else 0.1  # gradients reach 12
    for one, other in zip(*map(jax.tree.leaves, (results(spread), results(whole))), strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        assert np.allclose(one, other, atol=atol)


def test_full_attention_around_a_ring() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), "cp")
    run = jax.shard_map(
        lambda q, k, v: context_attention(q, k, v, axis="cp", strategy=CPStrategy.RING),
        mesh=mesh,
        in_specs=ROWS,
        out_specs=ROWS,
    )
    assert np.allclose(jax.jit(run)(*ARRAYS), attention(*ARRAYS), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "axis='cp' is no axis of a jax.shard_map around this call"),
        ({"mask": "padding"}, "it is one of none, causal"),
        ({"window": (3, 0), "strategy": CPStrategy.RING}, "a window needs mask='causal'"),
        ({"dropout_p": 0.5}, "dropout_p is not served over several devices"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        context_attention(*ARRAYS, axis="cp", **options)
