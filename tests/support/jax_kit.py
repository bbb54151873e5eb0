"""Calls of the JAX front end beside those of the reference in torch, on the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from attngen.jax import attention

from attngen import reference

RELATIVE = 1e-13  # of the largest number
Numbers = Mapping[str, Any]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, float64."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def in_torch(numbers: Numbers, learned: tuple[str, ...], **words: Any) -> dict[str, np.ndarray]:
    """Output, LSE, largest scores and gradients of the sum of squares of both, by the reference."""
    given = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in numbers.items()}
    for name in learned:
        given[name].requires_grad_()
    out, aux = reference.attention(**given, **words, return_max_logit=True)
    shown = torch.where(aux.lse > -np.inf, aux.lse, 0)
    if learned:
        ((out**2).sum() + (shown**2).sum()).backward()
    found = {"o": out, "lse": aux.lse, "max_logit": aux.max_logit}
    found |= {name: given[name].grad for name in learned}
    return {name: x.detach().numpy() for name, x in found.items()}


def in_jax(numbers: Numbers, learned: tuple[str, ...], **words: Any) -> dict[str, np.ndarray]:
    """These by `attngen.jax`, in 64 bits."""
    with jax.enable_x64(True):
        given = {
            name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in numbers.items()
        }

        def loss(values: dict[str, Any]) -> Any:
            made = {**given, **values}
            out, aux = attention(**made, **words, return_lse=True, return_max_logit=True)
            shown = jnp.where(aux.lse > -jnp.inf, aux.lse, 0)
            found = {"o": out, "lse": aux.lse, "max_logit": aux.max_logit}
            return (out**2).sum() + (shown**2).sum(), found

        values = {name: given[name] for name in learned}
        gradients, found = jax.jit(jax.grad(loss, has_aux=True))(values)
        return {name: np.asarray(x) for name, x in {**found, **gradients}.items()}


def compare(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    """Raises: AssertionError naming what differs by more than the largest number's rounding."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        y = found[name]
        assert y.shape == x.shape, name
        finite = np.isfinite(x)
        assert np.array_equal(y[~finite], x[~finite]), name
        largest = np.abs(x[finite]).max(initial=1.0)
        difference = np.abs(y[finite] - x[finite]).max(initial=0.0)
        assert difference <= RELATIVE * largest, f"{name}: {difference / largest:.2e}"
