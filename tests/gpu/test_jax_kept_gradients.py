"""Backwards of JAX that keep dS in memory: right in rounds of heads, and of one limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attngen import reference
from attngen.call import kept_ds

from .test_jax import carriers, device, jax, jnp

__all__ = ["device"]  # a fixture
pytestmark = pytest.mark.gpu


def plain(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x.astype(jnp.float32))).double()


def test_gradients_are_right_in_rounds_of_heads(monkeypatch) -> None:
    from attngen.jax import attention

    monkeypatch.setattr(kept_ds, "MOST_BYTES", 200_000)
    given = carriers(2, 4, 2, 150, 130, 136)
    operands = [given[name] for name in "qkv"]

    def loss(q, k, v):
        out = attention(q, k, v, mask="causal", backend="cuda").astype(jnp.float32)
        return (out**2).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*operands)
    leaves = [plain(x).requires_grad_() for x in operands]
    out, _ = reference.attention(*leaves, mask="causal")
    wanted = torch.autograd.grad((out**2).sum(), leaves)
    for x, y in zip(found, wanted, strict=True):
        assert (plain(x) - y).norm() < 0.02 * y.norm()


@pytest.mark.wgmma
def test_programs_refuse_another_limit_than_they_were_made_for(monkeypatch) -> None:
    from attngen.jax import attention

    x = jnp.ones((1, 70, 2, 136), jnp.bfloat16)

    def loss(x):
        return attention(x, x, x, backend="cuda").astype(jnp.float32).sum()

    made = jax.jit(jax.grad(loss)).lower(x)
    monkeypatch.setenv(kept_ds.VARIABLE, "0")
    with pytest.raises(Exception, match=f"bytes of scratch .* under another {kept_ds.VARIABLE}"):
        made.compile()(x).block_until_ready()
