"""Outputs and gradients that lie where a call says: like Q, or in the caller's tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError

from . import oracle

pytestmark = pytest.mark.gpu
CUDA: dict[str, Any] = {"backend": "cuda"}


def heads_first(*shape: int, seed: int = 0) -> Tensor:
    """A tensor [b, h, s, d] whose memory is [b, s, h, d]."""
    b, h, s, d = shape
    return oracle.randn(b, s, h, d, seed=seed).transpose(1, 2)


def in_order(x: Tensor) -> bool:
    return x.transpose(1, 2).is_contiguous()


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"shape": (2, 4, 2, 70, 70, 64), "mask": "causal"},
    "few queries": {"shape": (2, 4, 2, 1, 300, 128)},
    "wide": {"shape": (1, 4, 2, 70, 70, 256), "mask": "causal"},
    "odd head dim": {"shape": (1, 2, 2, 70, 70, 36)},
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_like_q_have_the_bits_of_contiguous_ones(name: str) -> None:
    given = dict(CALLS[name])
    b, h, h_kv, s_q, s_kv, d = given.pop("shape")
    found = []
    for layout in ("contiguous", "like_q"):
        shapes = (b, h, s_q, d), (b, h_kv, s_kv, d), (b, h_kv, s_kv, d)
        q, k, v = (heads_first(*x, seed=n).requires_grad_() for n, x in enumerate(shapes))
        options = {**given, "layout": "bhsd", "deterministic": True, **CUDA}
        out, aux = attngen.attention(q, k, v, out_layout=layout, return_lse=True, **options)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        like_q = layout == "like_q"
        assert in_order(out) == (like_q or s_q == 1)
        if s_q > 1:
            assert [in_order(x) for x in gradients] == [like_q] * 3
        found.append([out, aux.lse, *gradients])
    assert oracle.same(*found)


def test_packed_operands_have_packed_gradients_and_an_output_like_q() -> None:
    packed = oracle.randn(130, 3, 2, 2, 64, seed=1).transpose(0, 1).transpose(1, 2)
    qkv = packed.requires_grad_()  # [3, 2, 130, …] of a view is no layout: the heads' are
    q, k, v = (x.transpose(0, 1) for x in qkv.unbind(0))
    found = []
    for layout in ("contiguous", "like_q"):
        out = attngen.attention(q, k, v, layout="sbhd", out_layout=layout, **CUDA)
        (gradient,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
        found.append([out, gradient])
    assert oracle.same(*found)


def test_calls_write_where_the_caller_says() -> None:
    q, k, v = oracle.operands(2, 4, 2, 130, 130, 64)
    given: dict[str, Any] = {"mask": "causal", "return_lse": True, **CUDA}
    wanted, aux = attngen.attention(q, k, v, **given)
    room = torch.full((2, 130, 3, 4, 64), torch.nan, dtype=q.dtype, device=q.device)
    for where in (torch.empty_like(wanted), room[:, :, 1]):
        for _ in range(3):  # the second call like it is the kernels'
            where.fill_(torch.nan)
            before = where._version
            out, own = attngen.attention(q, k, v, out=where, **given)
            assert out is where and torch.equal(out, wanted) and torch.equal(own.lse, aux.lse)
            assert where._version > before  # as of any operation in place
    assert room[:, :, ::2].isnan().all()
    alone = attngen.attention(q, k, v, mask="causal", **CUDA)
    again = attngen.attention(q, k, v, mask="causal", out=torch.empty_like(q), **CUDA)
    assert torch.equal(alone, again)


def test_kernels_write_there_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = oracle.operands(1, 2, 2, 70, 70, 64)
    wanted = attngen.attention(q, k, v, **CUDA)
    monkeypatch.setattr(Tensor, "copy_", None)
    assert torch.equal(attngen.attention(q, k, v, out=torch.zeros_like(q), **CUDA), wanted)


@pytest.mark.parametrize("case", ["unaligned", "steps", "no keys", "alibi and dropout"])
def test_places_that_the_copy_engine_does_not_reach_are_copied_to(case: str) -> None:
    q, k, v = oracle.operands(1, 2, 2, 70, 70, 64)
    given: dict[str, Any] = dict(CUDA)
    where = torch.full_like(q, torch.nan)
    if case == "unaligned":
        where = torch.full((q.numel() + 1,), torch.nan, dtype=q.dtype, device=q.device)[1:]
        where = where.view(q.shape)
    elif case == "steps":
        where = torch.full((*q.shape, 2), torch.nan, dtype=q.dtype, device=q.device)[..., 0]
    elif case == "no keys":
        k, v = k[:, :0], v[:, :0]
    else:
        state = torch.tensor([3, 0], dtype=torch.int64, device=q.device)
        given |= {"alibi_slopes": True, "dropout_p": 0.5, "rng_state": state}
        given |= {"return_rng_state": True}
    wanted = attngen.attention(q, k, v, **given)
    for _ in range(2):
        found = attngen.attention(q, k, v, out=where, **given)
        pair = zip(*((x if isinstance(x, tuple) else (x, 0)) for x in (found, wanted)), strict=True)
        (own, other), _ = pair
        assert own is where and torch.equal(own, other)


def test_place_of_an_operand_is_refused() -> None:
    q, k, v = oracle.operands(1, 2, 2, 70, 70, 64)
    attngen.attention(q, k, v, **CUDA)
    shifted = torch.empty(q.numel() + 64, dtype=q.dtype, device=q.device)
    inside = shifted[: q.numel()].view(q.shape).copy_(q)
    for operand, where in ((q, q), (inside, shifted[64:].view(q.shape))):
        with pytest.raises(SpecError, match="out lies where q does"):
            attngen.attention(operand, k, v, out=where, **CUDA)
