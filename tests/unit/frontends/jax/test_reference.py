"""The definition in jax.numpy against the one in torch, both in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

from attngen.jax import attention  # noqa: E402

from attngen import reference  # noqa: E402
from tests.support.jax_kit import compare, in_jax, in_torch, random  # noqa: E402

jnp = jax.numpy
B, H, H_KV, S, T, D = 2, 4, 2, 9, 13, 8
CARRIERS = {"q": random(B, S, H, D), "k": random(B, T, H_KV, D), "v": random(B, T, H_KV, D + 4)}
PACKED = {
    "q": random(14, H, D),
    "k": random(16, H_KV, D),
    "v": random(16, H_KV, D),
    "cu_seqlens_q": np.array([0, 5, 5, 12], np.int32),
    "cu_seqlens_kv": np.array([0, 4, 7, 15], np.int32),
    "layout": "thd",
}
STATE = {"rng_state": np.array([0x1234_5678_9ABC_DEF0, 77], np.int64), "dropout_p": 0.3}
MASK = np.random.default_rng(5).random((B, 1, S, T)) > 0.3
CASES: dict[str, dict[str, Any]] = {
    "window and bias": {
        "window": (2, 4),
        "bottom_right": True,
        "softcap": 2.0,
        "bias": random(1, H, S, T),
    },
    "lengths": {
        "seqused_q": np.array([9, 4], np.int32),
        "seqused_kv": np.array([0, 11], np.int32),
        "mask": "padding_causal_bottom_right",
        "window": (5, 0),
        "softmax_scale": 0.3,
        "alibi_slopes": random(B, H),
    },
    "dense ends": {
        "cu_seqlens_q": np.array([0, 9, 12], np.int32),
        "cu_seqlens_kv": np.array([0, 2, 15], np.int32),
        "softmax": "off_by_one",
        "alibi_slopes": True,
    },
    "mask, sink, bias before the scale": {
        "attn_mask": MASK,
        "mask": "causal",
        "bias": random(B, 1, 1, T),
        "bias_type": "pre_scale",
        "sink": random(H),
        "softmax": "learnable",
    },
    "one tensor": {
        **STATE,
        "q": random(S, B, 3, H, D),
        "k": None,
        "v": None,
        "layout": "sb3hd",
        "mask": "causal",
    },
    "keys and values in one": {
        "q": random(B, S, H, D),
        "k": random(B, T, H_KV, 2, D),
        "v": None,
        "layout": "bshd_bsh2d",
        "mask": "causal+chunked",
        "chunked": 4,
    },
    "packed with gaps": {
        **PACKED,
        **STATE,
        "cu_seqlens_q_padded": np.array([1, 6, 6, 14], np.int32),
        "mask": "causal_bottom_right",
        "bias": random(3, H, 7, 8),
        "max_seqlen_q": 7,
        "max_seqlen_kv": 8,
    },
    "positions": {
        **STATE,
        "positions": (21, 6, 3, 1, 2),
        "window": (4, 3),
        "alibi_slopes": random(H),
    },
    "packed queries": {
        "q": random(14, H, D),
        "k": random(3, 6, H_KV, D),
        "v": random(3, 6, H_KV, D),
        "cu_seqlens_q": np.array([0, 5, 5, 12], np.int32),
        "seqused_kv": np.array([6, 0, 3], np.int32),
        "layout": "thd_bshd_bshd",
        "softmax": "learnable",
        "sink": random(H),
    },
    "pages": {
        "q": random(B, S, H, D),
        "k": random(5, 4, H_KV, D),
        "v": random(5, 4, H_KV, D),
        "page_table": np.array([[4, 0, 2], [1, 3, 99]], np.int32),
        "seqused_kv": np.array([10, 7], np.int32),
        "layout": "paged_kv_bshd_bshd_bshd",
        "mask": "causal_bottom_right",
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_and_gradients_are_those_of_torch(case: dict[str, Any]) -> None:
    numbers = {**CARRIERS, **case}
    learned = ("q", "k", "v", "bias", "sink", "alibi_slopes")
    names = [name for name in learned if isinstance(numbers.get(name), np.ndarray)]
    if "page_table" in numbers:  # inference alone
        names = []
    compare(in_jax(numbers, tuple(names)), in_torch(numbers, tuple(names)))


@pytest.mark.parametrize("stored", [None, "float8_e5m2"])
def test_fp8_is_stored_as_in_torch(stored: str | None) -> None:
    """Scales of sequences and heads, weights in 8 bits, and the maxima that scales are made of."""
    numbers = {name: random(B, S, H if name == "q" else H_KV, 16) for name in "qkv"}
    scales = {"descale_q": np.abs(random(B, H_KV)), "descale_k": np.array([0.5])}
    if stored:
        scales |= {"scale_o": np.array([2.0]), "scale_s": np.array([64.0])}
        scales["descale_s"] = np.array([1 / 64])
    words = {"mask": "causal", "softmax": "off_by_one", "return_amax": True}
    wide = {name: x.astype(np.float32) for name, x in scales.items()}
    found, aux = attention(
        *(jnp.asarray(x).astype(jnp.float8_e4m3fn) for x in numbers.values()),
        **{name: jnp.asarray(x) for name, x in wide.items()},
        **words,
        out_dtype=stored and getattr(jnp, stored),
    )
    wanted, theirs = reference.attention(
        *(torch.tensor(x).float().to(torch.float8_e4m3fn) for x in numbers.values()),
        **{name: torch.tensor(x) for name, x in wide.items()},
        **words,
        out_dtype=stored and getattr(torch, stored),
    )
    out, other = np.asarray(found.astype(jnp.float32)), wanted.float().numpy()
    assert found.dtype.name == (stored or "bfloat16")
    assert np.abs(out - other).max() <= 2**-7 * np.abs(other).max()
    assert np.allclose(aux.lse, theirs.lse, rtol=1e-5)
    assert np.allclose(aux.amax_o, theirs.amax_o, rtol=1e-5)
    assert aux.amax_s.item() == theirs.amax_s.item() == 1
