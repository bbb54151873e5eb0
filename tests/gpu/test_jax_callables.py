"""Functions of positions in JAX: kernels of their programs, beside the functions themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .test_jax import carriers, device, jax, jnp, random

__all__ = ["device"]  # a fixture
pytestmark = pytest.mark.gpu
H = 4
TABLE = random(33, H, dtype="float32")
SEGMENTS = jnp.asarray(np.sort(np.arange(2 * 150).reshape(2, 150) // 67, axis=1), jnp.int32)


def relative_table(s, b, h, i, j):
    return s + TABLE[jnp.clip(j - i, -16, 16) + 16, h]


def capped_in_segments(s, b, h, i, j):
    capped = 5 * jnp.tanh(s / 5) * (1 + (i - j) % 3)
    return jnp.where(SEGMENTS[b, i] == SEGMENTS[b, j], capped, -jnp.inf)


@pytest.mark.parametrize("mod", [relative_table, capped_in_segments])
def test_kernels_compute_what_functions_do(mod: Any) -> None:
    from attngen.jax import attention

    given = carriers(2, H, 2, 150, 150, 64)

    def results(backend: str) -> Any:
        def loss(given: dict[str, Any]) -> Any:
            words = {"mask": "causal", "score_mod": mod, "backend": backend}
            out, aux = attention(**given, **words, return_lse=True)
            rows = jnp.where(aux.lse > -jnp.inf, aux.lse, 0)
            return (out.astype(jnp.float32) ** 2).sum() + rows.sum(), (out, aux.lse)

        return jax.tree.leaves(jax.jit(jax.grad(loss, has_aux=True))(given))

    for found, wanted in zip(results("cuda"), results("reference"), strict=True):
        one, other = (np.asarray(x.astype("float32")) for x in (found, wanted))
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max()


def test_gradients_of_captured_arrays_are_the_definitions() -> None:
    """Arrays of each kind of place, one of them in 16 bits, beside q."""
    from attngen.jax import attention

    given = carriers(2, H, 2, 150, 150, 64)
    captured = {
        "table": TABLE,
        "by_head": random(H, dtype="float32") / 4,
        "by_key": random(2, 150),
        "gain": jnp.float32(0.5),
    }

    def results(backend: str) -> Any:
        def loss(captured: Any, q: Any) -> Any:
            def mod(s, b, h, i, j):
                far = captured["table"][jnp.clip(j - i, -16, 16) + 16, h] * captured["gain"]
                scaled = s * (1 + captured["by_head"][h])
                return scaled + far + captured["by_key"][b, j].astype(jnp.float32)

            words = {"mask": "causal", "score_mod": mod, "backend": backend}
            out = attention(**{**given, "q": q}, **words)
            return (out.astype(jnp.float32) ** 2).sum()

        made, dq = jax.jit(jax.grad(loss, (0, 1)))(captured, given["q"])
        return {**made, "q": dq}

    found, wanted = results("cuda"), results("reference")
    for name, x in wanted.items():
        one, other = (np.asarray(each.astype("float32")) for each in (found[name], x))
        assert found[name].dtype == x.dtype and np.abs(other).max() > 0
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max(), name


@pytest.mark.parametrize("beside_q", [True, False])
def test_numbers_of_queries_are_learned_of_their_gradients(beside_q: bool) -> None:
    """Whether or not these are wanted, too; some are 0."""
    from attngen.jax import attention

    given = carriers(2, H, 2, 130, 150, 128)
    heat = jnp.maximum(random(2, H, 130, dtype="float32"), 0)

    def results(backend: str) -> Any:
        def loss(heat: Any, q: Any) -> Any:
            words = {"mask": "causal", "score_mod": lambda s, b, h, i, j: s * heat[b, h, i]}
            out = attention(**{**given, "q": q}, **words, backend=backend)
            return (out.astype(jnp.float32) ** 2).sum()

        wanted = (0, 1) if beside_q else 0
        return jax.tree.leaves(jax.jit(jax.grad(loss, wanted))(heat, given["q"]))

    for found, wanted in zip(results("cuda"), results("reference"), strict=True):
        one, other = (np.asarray(x.astype("float32")) for x in (found, wanted))
        assert np.abs(one - other).max() <= 0.03 * np.abs(other).max()


def test_mask_of_positions_is_booleans_of_kernels() -> None:
    from attngen.jax import attention

    given = carriers(2, H, 2, 150, 150, 64)
    found, wanted = (
        attention(**given, mask_mod=lambda b, h, i, j: (i - j < 9) & (i >= j), backend=backend)
        for backend in ("cuda", "reference")
    )
    assert jnp.allclose(found.astype("float32"), wanted.astype("float32"), atol=0.02)
