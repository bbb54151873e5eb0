"""Left padding by the kernels: forward and backward, as the reference has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen

from . import oracle

pytestmark = pytest.mark.gpu
STARTS, ENDS = [70, 0, 129], [200, 131, 130]


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_kernels_read_the_rows_of_sequences(layout: str) -> None:
    order = ["bshd".index(axis) for axis in layout]
    made = [oracle.randn(3, 200, heads, 64, seed=n).bfloat16() for n, heads in enumerate((4, 2, 2))]
    for x in made:
        for b, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
            x[b, :start] = x[b, end:] = torch.nan
    places = [torch.tensor(x, dtype=torch.int32).to(oracle.DEVICE) for x in (STARTS, ENDS)]
    named = ("seqstart_q", "seqused_q"), ("seqstart_kv", "seqused_kv")
    given: dict[str, Any] = {"layout": layout, "mask": "causal", "return_lse": True}
    for names in named:
        given |= dict(zip(names, places, strict=True))
    results = []
    for backend in ("cuda", "reference"):
        leaves = [x.permute(order).clone().requires_grad_() for x in made]
        with attngen.trace() as trace:
            out, aux = attngen.attention(*leaves, **given, backend=backend)
            out.float().square().sum().backward()
        found = {problem.direction for problem, _ in trace.variants}
        assert found == ({"fwd", "bwd"} if backend == "cuda" else set())
        results.append([out, aux.lse, *(x.grad for x in leaves)])
    for got, wanted in zip(*results, strict=True):
        seen = wanted.isfinite()
        assert torch.equal(got.isfinite(), seen)
        error = (got - wanted)[seen].float().abs().max()
        assert error <= 2e-2 * wanted[seen].float().abs().max()
