"""Nested (jagged) tensors on the kernels: the bits of packed tokens, both directions."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, varlen
from .varlen import Call

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 3, 130, 64, 0, 257)
KERNELS = [Call("thd", LENGTHS, d=64, mask="causal").spec]


@pytest.mark.parametrize("gaps", [False, True])
def test_nested_call_gives_the_bits_of_packed_tokens(gaps):
    call = Call("thd", LENGTHS, gaps=gaps, d=64, heads=(4, 2), mask="causal")
    operands = [x.requires_grad_() for x in call.operands()]
    arguments = {"backend": "cuda", "return_lse": True, "deterministic": True}
    wanted, by = attngen.attention(*operands, **call.arguments(), **arguments)
    offsets = torch.tensor(call.offsets(LENGTHS), device=oracle.DEVICE)
    lengths = torch.tensor(LENGTHS, device=oracle.DEVICE) if gaps else None
    jagged = torch.nested.nested_tensor_from_jagged
    nested = [jagged(x, offsets, lengths) for x in operands]
    plain = {"layout": "thd", "mask": "causal"}
    out, aux = attngen.attention(*nested, **plain, **arguments)
    assert out.is_nested and out.offsets() is offsets
    assert oracle.same((out.values(), aux.lse), (wanted, by.lse))
    d_o = call.tensor("q", 4, 64, 7)
    found = torch.autograd.grad(out.values(), operands, d_o)
    assert oracle.same(found, torch.autograd.grad(wanted, operands, d_o))


def test_nested_operands_that_are_mixed_are_refused():
    q = varlen.Call("thd", (3, 4), d=64).operands()[0]
    offsets = torch.tensor([0, 3, 7], device=oracle.DEVICE)
    nested = torch.nested.nested_tensor_from_jagged(q, offsets)
    with pytest.raises(attngen.SpecError, match="nested"):
        attngen.attention(nested, q, q, layout="thd", backend="cuda")
