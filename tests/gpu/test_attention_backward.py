"""`attngen.attention_backward` launches the kernels that autograd does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen

from . import oracle

pytestmark = pytest.mark.gpu
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "sink": {"softmax": "learnable"},
    "bias": {},
    "dropout": {"dropout_p": 0.25},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_have_the_bits_of_autograds(case: str) -> None:
    given: dict[str, Any] = {**CASES[case], "deterministic": True, "backend": "cuda"}
    q, k, v = (x.requires_grad_() for x in oracle.operands(1, 4, 2, 70, 70, 64))
    leaves = [q, k, v]
    if case == "sink":
        leaves.append(oracle.randn(4, dtype=torch.float32, seed=5).requires_grad_())
        given["sink"] = leaves[-1]
    elif case == "bias":
        leaves.append(oracle.randn(1, 4, 70, 70, seed=5).requires_grad_())
        given["bias"] = leaves[-1]
    elif case == "dropout":
        given["rng_state"] = torch.tensor([3, 0], dtype=torch.int64, device=q.device)
    out, aux = attngen.attention(q, k, v, return_lse=True, **given)
    d_out, d_lse = oracle.randn(*out.shape, seed=6), oracle.randn(*aux.lse.shape, seed=7).float()
    wanted = torch.autograd.grad((out, aux.lse), leaves, (d_out, d_lse))
    found = attngen.attention_backward(d_out, q, k, v, out, aux.lse, dlse=d_lse, **given)
    made = [found.dq, found.dk, found.dv, found.dsink, found.dbias]
    assert oracle.same([x for x in made if x is not None], wanted)
