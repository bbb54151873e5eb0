"""`attngen.attention_backward`: the gradients that autograd makes of the same call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError

GENERATOR = torch.Generator().manual_seed(0)
REFERENCE: dict[str, Any] = {"backend": "reference"}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "bias and sink": {
        **{"bias": numbers(1, 4, 6, 6), "softmax": "learnable", "sink": numbers(4)},
        "return_max_logit": True,
    },
    "dropout": {"dropout_p": 0.5, "rng_state": torch.tensor([7, 0])},
}
SHAPES = (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 5)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case: str) -> None:
    given, operands = CASES[case], [numbers(*shape) for shape in SHAPES]
    learned = {name: given[name] for name in ("sink", "bias") if name in given}
    leaves = [x.clone().requires_grad_() for x in (*operands, *learned.values())]
    replaced = dict(zip(learned, leaves[3:], strict=True))
    out, aux = attngen.attention(*leaves[:3], return_lse=True, **{**given, **replaced}, **REFERENCE)
    dout, dlse = torch.ones_like(out), numbers(*aux.lse.shape)
    wanted = torch.autograd.grad((out, aux.lse), leaves, (dout, dlse))
    same = {name: x for name, x in given.items() if name != "return_max_logit"}
    with torch.no_grad():
        results = out.detach(), aux.lse.detach()
        found = attngen.attention_backward(
            dout, *operands, *results, dlse=dlse, **same, **REFERENCE
        )
    made = [found.dq, found.dk, found.dv, *[getattr(found, f"d{name}") for name in learned]]
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert (found.dbias is None) == ("bias" not in given)


def test_packed_operands_have_one_gradient() -> None:
    qkv = numbers(2, 6, 3, 2, 8)
    out, aux = attngen.attention(qkv, layout="bs3hd", return_lse=True, **REFERENCE)
    found = attngen.attention_backward(
        out, qkv, None, None, out, aux.lse, layout="bs3hd", **REFERENCE
    )
    assert found.dq.shape == qkv.shape and found.dk is found.dv is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dropout_p": 0.5}, "needs the rng_state that the call returned"),
        ({"score_mod": lambda score, b, h, i, j: score}, "takes no functions"),
        ({"seqstart_q": torch.zeros(2, dtype=torch.int32)}, "rows that begin late"),
        ({"backend": "cuda"}, "cpu has no kernels"),
        ({"dout": numbers(1)}, "dout needs float32 .2, 6, 4, 5., got float32 .1."),
        ({"dout": numbers(2, 6, 4, 5).double()}, "dout needs float32 .*, got float64"),
        ({"dout": None}, "dout needs a tensor; got NoneType"),
        ({"lse": numbers(2, 6, 4)}, "^lse needs float32 .2, 4, 6., got"),
        ({"out": numbers(2, 6, 4, 8)}, "^out needs float32 .2, 6, 4, 5., got"),
        ({"dlse": [1]}, "dlse needs a tensor; got list"),
    ],
    ids=[
        *("dropout", "function", "padding", "kernels", "shape", "dtype", "nothing"),
        *("lse", "output", "list"),
    ],
)
def test_calls_that_have_none_are_refused(given: dict[str, Any], why: str) -> None:
    q, k, v = (numbers(*shape) for shape in SHAPES)
    out, aux = attngen.attention(q, k, v, return_lse=True, **REFERENCE)
    named = {"dout": out, "out": out, "lse": aux.lse, **REFERENCE, **given}
    results = [named.pop(name) for name in ("dout", "out", "lse")]
    dout, *rest = results
    with pytest.raises(SpecError, match=why):
        attngen.attention_backward(dout, q, k, v, *rest, **named)


def test_nested_tensors_and_transforms_are_refused() -> None:
    x = numbers(6, 2, 8)
    out, aux = attngen.attention(x[None], x[None], x[None], return_lse=True, **REFERENCE)
    nested = torch.nested.as_nested_tensor([x], layout=torch.jagged)
    lengths = torch.tensor([0, 6], dtype=torch.int32)
    given = {"layout": "thd", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, **REFERENCE}
    with pytest.raises(SpecError, match="takes no nested tensors"):
        attngen.attention_backward(out[0], nested, nested, nested, out[0], aux.lse, **given)
    with pytest.raises(SpecError, match="no transform of torch.func"):
        torch.vmap(lambda x: attngen.attention_backward(x, x, x, x, x, aux.lse).dq)(out[None])


def test_operands_are_cast_as_the_call_cast_them() -> None:
    leaves = [numbers(*shape).requires_grad_() for shape in SHAPES]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, aux = attngen.attention(*leaves, return_lse=True, **REFERENCE)
        results = torch.ones_like(out), *leaves, out.detach(), aux.lse.detach()
        found = attngen.attention_backward(*results, **REFERENCE)
    wanted = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for one, other in zip((found.dq, found.dk, found.dv), wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other)
