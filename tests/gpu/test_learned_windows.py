"""Gradients of what a score captures, under windows of few keys, beside those of Q, K and V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen

from . import gradients, oracle

pytestmark = pytest.mark.gpu

LENGTH, HEADS = 320, 2
# Scores that learn numbers of distances, queries or keys, of a head each.
MODS: dict[str, Callable[[torch.Tensor], Callable[..., torch.Tensor]]] = {
    "distances": lambda x: lambda s, b, h, i, j: s + x[h, i - j + LENGTH],
    "keys": lambda x: lambda s, b, h, i, j: s + x[h, j],
    "queries": lambda x: lambda s, b, h, i, j: s * torch.sigmoid(x[h, i]),
}


@pytest.mark.parametrize("name", MODS)
def test_gradients_of_all_under_a_narrow_window_are_right(name) -> None:
    """Kernels of narrow windows add up dQ in an order, but what a score learns without one."""
    tensors = oracle.operands(1, HEADS, HEADS, LENGTH, LENGTH, 128)
    d_o = oracle.randn(*tensors[0].shape, dtype=tensors[0].dtype, seed=5)
    table = oracle.randn(HEADS, 2 * LENGTH, dtype=torch.float32, seed=7)
    window: dict[str, Any] = {"mask": "causal", "window": (32, 0)}
    found, expected = [], []
    for backend, into in (("cuda", found), ("reference", expected)):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, table)]
        *operands, own = leaves
        out = attngen.attention(*operands, score_mod=MODS[name](own), **window, backend=backend)
        into += torch.autograd.grad(out, leaves, d_o)
    gradients.check(found[:3], (*tensors, d_o), None, score_mod=MODS[name](table), **window)
    error = oracle.largest((found[3] - expected[3]).abs())
    assert error <= 2**-6 * oracle.largest(expected[3].abs())
