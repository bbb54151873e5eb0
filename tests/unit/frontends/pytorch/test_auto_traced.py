"""In traced code, too, `backend="auto"` goes to the reference for what kernels refuse."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import attngen

BATCH, S, H, D = 2, 6, 4, 16


def operands(dtype=torch.bfloat16, grad=False):
    make = torch.Generator().manual_seed(0)
    tensors = [torch.randn(BATCH, S, H, D, generator=make).to(dtype) for _ in "qkv"]
    return [x.requires_grad_(grad) for x in tensors]


SLOPES = torch.linspace(0.1, 0.5, H)
REFUSED = {
    "scale": (False, {"softmax_scale": -0.2}),
    "softcap": (False, {"softcap": 1e-39}),
    "float32 output": (True, {"out_dtype": torch.float32}),
    "slopes": (True, {"alibi_slopes": SLOPES.requires_grad_()}),
    "column": (True, {"bias": torch.randn(S, 1).bfloat16().requires_grad_()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_traced_call_that_kernels_refuse_is_the_reference(kernels, case) -> None:
    grad, options = REFUSED[case]
    tensors = operands(grad=grad)

    def call(q, k, v, backend="auto"):
        return attngen.attention(q, k, v, **options, backend=backend)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    wanted = call(*tensors, backend="reference")
    assert not kernels.calls and torch.equal(found, wanted)
    if grad:
        leaves = [*tensors, *(x for x in options.values() if isinstance(x, torch.Tensor))]
        one, other = (torch.autograd.grad(x.float().sum(), leaves) for x in (found, wanted))
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"bias": torch.randn(S, S)}, {"window": None}], ids="-".join
)
def test_traced_call_that_kernels_serve_stays_with_them(kernels, options) -> None:
    tensors = operands(grad=True)

    def call(q, k, v):
        return attngen.attention(q, k, v, **options)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    assert kernels.names == ["forward"] and torch.equal(found, call(*tensors))


def test_learned_scale_is_left_to_the_reference(kernels) -> None:
    """Kernels take its number, of which there would be no gradient."""
    q, k, v = operands()
    scale = torch.tensor(0.3, requires_grad=True)
    out = attngen.attention(q, k, v, softmax_scale=scale)
    assert not kernels.calls
    (found,) = torch.autograd.grad(out.float().square().sum(), scale)
    assert found.isfinite() and found != 0
    with pytest.raises(attngen.SpecError, match="softmax_scale requires a gradient"):
        attngen.attention(q, k, v, softmax_scale=scale, backend="cuda")
    with torch.no_grad():
        attngen.attention(q, k, v, softmax_scale=scale, backend="cuda")
    assert kernels.names == ["forward"]


def test_forward_mode_is_left_to_the_reference(kernels) -> None:
    q, k, v = operands(torch.float16)
    with forward_ad.dual_level():
        dual = attngen.attention(forward_ad.make_dual(q, q), k, v)
        wanted = attngen.attention(forward_ad.make_dual(q, q), k, v, backend="reference")
        for one, other in zip(*map(forward_ad.unpack_dual, (dual, wanted)), strict=True):
            assert torch.equal(one, other)
