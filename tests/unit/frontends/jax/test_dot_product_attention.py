"""The function of jax.nn and its double: signatures, results, gradients, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from attngen.jax import dot_product_attention  # noqa: E402

from attngen import SpecError  # noqa: E402

jnp = jax.numpy
B, T, S, N, K, H = 2, 6, 9, 4, 2, 8


def random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32))


Q, KEY, VALUE = random(B, T, N, H), random(B, S, K, H), random(B, S, K, H, seed=1)
CASES: dict[str, dict[str, Any]] = {
    "causal with a bias": {"is_causal": True, "bias": random(1, N, T, S), "scale": 0.4},
    "mask and window": {
        "mask": random(B, 1, T, S) > -1,
        "local_window_size": (4, 3),
        "key_value_seq_lengths": jnp.asarray([9, 8], jnp.int32),
    },
    "lengths": {
        "query_seq_lengths": jnp.asarray([6, 3], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([4, 9], jnp.int32),
        "local_window_size": 8,
    },
}


def test_signature_is_that_of_jax() -> None:
    both = dot_product_attention, jax.nn.dot_product_attention
    own, theirs = (inspect.signature(x).parameters for x in both)
    assert [*own] == [*theirs]
    for name, parameter in theirs.items():
        assert (own[name].kind, own[name].default) == (parameter.kind, parameter.default)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_jax(case: dict[str, Any]) -> None:
    bias = case.get("bias", jnp.zeros((1, 1, 1, S)))
    rows = jnp.arange(T) < case.get("query_seq_lengths", jnp.full(B, T))[:, None]

    def run(q: Any, k: Any, v: Any, bias: Any, implementation: Any) -> Any:
        words = {**case, "bias": bias, "implementation": implementation}

        def loss(*arrays: Any) -> Any:
            out, residual = dot_product_attention(
                *arrays[:3], **{**words, "bias": arrays[3]}, return_residual=True
            )
            return (out**2).sum(), (out, jnp.where(rows[..., None], residual, 0))

        places = (0, 1, 2, 3) if "bias" in case else (0, 1, 2)
        return jax.grad(loss, argnums=places, has_aux=True)(q, k, v, bias)

    found, wanted = (
        jax.tree.leaves(jax.jit(run, static_argnums=4)(Q, KEY, VALUE, bias, x))
        for x in (None, "xla")
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_arrays_without_a_batch() -> None:
    arrays = [x.reshape(x.shape[1:]) for x in (Q[:1], KEY[:1], VALUE[:1])]
    out, residual = dot_product_attention(*arrays, is_causal=True, return_residual=True)
    assert out.shape == (T, N, H) and residual.shape == (T, N)
    assert np.allclose(out, jax.nn.dot_product_attention(*arrays, is_causal=True), atol=1e-5)


def test_what_differs_is_refused_or_said() -> None:
    with pytest.raises(ValueError, match="allowed: auto, cuda, reference"):
        dot_product_attention(Q, KEY, VALUE, implementation="triton")
    with pytest.raises(SpecError, match="attn_mask needs bool"):
        dot_product_attention(Q, KEY, VALUE, mask=random(B, 1, T, S))
    nothing = dot_product_attention(
        Q, KEY, VALUE, key_value_seq_lengths=jnp.asarray([0, 9], jnp.int32)
    )
    assert not nothing[:1].any() and nothing[1:].all()
