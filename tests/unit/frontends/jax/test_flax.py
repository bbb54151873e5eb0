"""The flax module with TransformerEngine's constructor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

from attngen.jax import DotProductAttention, attention  # noqa: E402

from attngen import SpecError  # noqa: E402

jnp = jax.numpy
X = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2, 4, 8), np.float32))


def module(**words: Any) -> DotProductAttention:
    return DotProductAttention(head_dim=8, num_attention_heads=4, **words)


def test_sequences_may_come_first_and_a_softmax_may_learn() -> None:
    layer = module(transpose_batch_sequence=True, softmax_type="learnable", scale_factor=1.0)
    parameters = layer.init(jax.random.key(0), X, X, X)
    boxed = parameters["params"]["_FusedDotProductAttention_0"]["softmax_offset"]
    assert boxed.names == (None, "nvte_head", None, None)
    offset = jnp.arange(4.0).reshape(1, 4, 1, 1)
    learned = {"_FusedDotProductAttention_0": {"softmax_offset": offset}}
    found = layer.apply({"params": learned}, X, X, X)
    rows = X.swapaxes(0, 1)
    wanted = attention(
        *(rows, rows, rows),
        mask="causal",
        softmax="learnable",
        sink=jnp.arange(4.0),
        softmax_scale=1.0,
    )
    assert np.allclose(found, wanted.swapaxes(0, 1), atol=1e-5)


def test_dropout_draws_from_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = module(attention_dropout=0.5, attn_mask_type="no_mask", qkv_layout="bs3hd")
    packed = jnp.stack([X, X, X], axis=2)
    one, other = (
        layer.apply({}, packed, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2)
    )
    assert not np.allclose(one, other)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    plain = layer.apply({}, packed, deterministic=True)
    assert np.allclose(plain, attention(X, X, X), atol=1e-5)


def test_words_that_are_none_are_refused() -> None:
    with pytest.raises(SpecError, match="Use one of DEFAULT, ALL_GATHER, RING"):
        module(context_parallel_strategy="a2a").apply({}, X, X, X)
    with pytest.raises(SpecError, match="dtype=float16 is not the arrays'"):
        module(dtype="float16").apply({}, X, X, X)
    with pytest.raises(SpecError, match="Pass one of them"):
        module().apply({}, X, X, X, X, mask=X)
