"""The doors for flash-attention 2 and 3 compute what these document, and return what they do."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from attngen.integrations import flash_attn as two
from attngen.integrations import flash_attn_interface as three
from torch import Tensor

from attngen import SpecError
from tests.support.flash_kit import (
    D_V,
    H_KV,
    HALF,
    HERE,
    S_KV,
    S_Q,
    B,
    D,
    H,
    alike,
    dense,
    of_batch,
    randn,
    truth,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal, scaled, capped": HALF,
    "a window": {"window_size": (3, 1)},
    "a causal window": {"causal": True, "window_size": (2, 0)},
}


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_function_returns_output_and_lse(door, variant: str) -> None:
    given, operands = VARIANTS[variant], dense(d_v=D_V)
    out, lse, *rest = door.flash_attn_func(*operands, **given, return_attn_probs=True, **HERE)
    alike((out, lse), of_batch(operands, **given))
    assert rest == ([None] if door is two else [])
    assert torch.equal(door.flash_attn_func(*operands, **given, **HERE), out)


def test_alibi_is_that_of_two() -> None:
    given = {"alibi_slopes": torch.rand(H), "causal": True, "deterministic": True}
    alike([two.flash_attn_func(*dense(), **given, **HERE)], of_batch(dense(), **given)[:1])


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_and_sinks_are_those_of_three(causal: bool) -> None:
    given = {"attention_chunk": 3, "s_aux": randn(H, seed=5).float(), "causal": causal}
    found = three.flash_attn_func(*dense(), **given, return_attn_probs=True, **HERE)
    alike(found, of_batch(dense(), **given))


def test_a_row_that_sees_no_key_is_zero() -> None:
    operands = dense(s_q=4, s_kv=2)
    out, lse, _ = two.flash_attn_func(*operands, causal=True, return_attn_probs=True, **HERE)
    assert not out[:, :2].any() and (lse[..., :2] == -math.inf).all()
    alike((out, lse), of_batch(operands, causal=True))


def test_dropout_keeps_a_share() -> None:
    operands = [torch.ones(1, 64, 2, 16) for _ in range(3)]
    out, lse, drawn = two.flash_attn_func(*operands, 0.25, return_attn_probs=True, **HERE)
    assert 0.9 < out.mean() < 1.1 and out.std() > 0 and lse.shape == (1, 2, 64) and drawn is None


@pytest.mark.parametrize("heads", ["qkv of two", "kv of two", "qkv of three", "groups of three"])
def test_packed_tensors_have_packed_gradients(heads: str) -> None:
    shapes = {
        "qkv of two": (two.flash_attn_qkvpacked_func, (B, 6, 3, H, D), {}),
        "kv of two": (two.flash_attn_kvpacked_func, (B, 6, 2, H_KV, D), {}),
        "qkv of three": (three.flash_attn_qkvpacked_func, (B, 6, 3, H, D), {}),
        "groups of three": (
            three.flash_attn_qkvpacked_func,
            (B, 6, H + 2 * H_KV, D),
            {"num_heads_q": H},
        ),
    }
    function, shape, given = shapes[heads]
    packed = [randn(*shape).requires_grad_() for _ in "ab"]
    q = [randn(B, 6, H, D, seed=1).requires_grad_() for _ in "ab"] if "kv of" in heads else []
    q = [] if "qkv" in heads else q
    one, other = packed
    found = function(*q[:1], one, **HALF, **given, **HERE)
    parts = other.unbind(2) if len(shape) == 5 else other.split([H, H_KV, H_KV], 2)
    wanted, _ = of_batch([*q[1:], *parts], **HALF)
    alike([found], [wanted])
    for out in (found, wanted):
        out.backward(randn(*out.shape, seed=8))
    alike([one.grad], [other.grad])


ENDS = torch.tensor([0, 4, 10]), torch.tensor([0, 9, 14])


def of_tokens(operands: list[Tensor], ends: Any = ENDS, **given: Any) -> tuple[Tensor, ...]:
    q, k, v = operands
    rows, keys = (each.tolist() for each in ends)
    each = [
        truth(q[a:b], k[c:d], v[c:d], **given)
        for a, b, c, d in zip(rows, rows[1:], keys, keys[1:], strict=False)
    ]
    outs, lses = zip(*each, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("door", [two, three], ids=["two", "three"])
def test_packed_tokens_and_their_gradients(door) -> None:
    shapes = (10, H, D), (14, H_KV, D), (14, H_KV, D)
    own, other = ([randn(*x, seed=n).requires_grad_() for n, x in enumerate(shapes)] for _ in "ab")
    given = {"return_attn_probs": True, **HALF}
    out, lse, *_ = door.flash_attn_varlen_func(*own, *ENDS, 6, 9, **given, **HERE)
    wanted, lses = of_tokens(other, **HALF)
    alike((out, lse), (wanted, lses))
    for each in (out, wanted):
        each.backward(randn(*out.shape, seed=8))
    alike([x.grad for x in own], [x.grad for x in other])


def test_packed_tokens_of_packed_tensors() -> None:
    q, kv = randn(10, H, D), randn(14, 2, H_KV, D)
    found = two.flash_attn_varlen_kvpacked_func(q, kv, *ENDS, 6, 9, **HALF, **HERE)
    alike([found], of_tokens([q, *kv.unbind(1)], **HALF)[:1])
    qkv, (ends, _) = randn(10, 3, H, D), ENDS
    found = two.flash_attn_varlen_qkvpacked_func(qkv, ends, 6, **HALF, **HERE)
    alike([found], of_tokens([*qkv.unbind(1)], (ends, ends), **HALF)[:1])


def test_tokens_in_use_of_three() -> None:
    q, k, v = randn(10, H, D), randn(14, H_KV, D), randn(14, H_KV, D, seed=2)
    used = {"seqused_q": torch.tensor([3, 6]), "seqused_k": torch.tensor([7, 2])}
    found = three.flash_attn_varlen_func(q, k, v, *ENDS, 6, 9, **used, causal=True, **HERE)
    first, _ = truth(q[:3], k[:7], v[:7], causal=True)
    second, _ = truth(q[4:], k[9:11], v[9:11], causal=True)
    alike([found], [torch.cat([first, q.new_zeros(1, H, D), second])])


def test_pages_of_packed_queries() -> None:
    q, k, v = randn(10, H, D), randn(16, H_KV, D), randn(16, H_KV, D, seed=2)
    table, ends = torch.tensor([[2, 0], [3, 1]]), torch.tensor([0, 7, 12])
    pages = [torch.stack([x[4:8], x[12:], x[:4], x[8:12]]) for x in (k, v)]
    given = {"block_table": table, "causal": True}
    found = two.flash_attn_varlen_func(q, *pages, ENDS[0], ends, 6, 7, **given, **HERE)
    whole = [torch.cat([x[:7], x[8:13]]) for x in (k, v)]
    alike([found], of_tokens([q, *whole], (ENDS[0], ends), causal=True)[:1])


def test_second_product_of_scores_is_of_values() -> None:
    """Dense and packed with gradients, and of caches that lie as MLA's do, which are not copied."""
    operands = [x.requires_grad_() for x in (*dense(d_v=D_V), randn(B, S_Q, H, D_V, seed=7))]
    q, k, v, qv = operands
    wanted = of_batch([torch.cat([q, qv], -1), torch.cat([k, v], -1), v], causal=True)
    d_out = randn(*wanted[0].shape, seed=8)
    true = torch.autograd.grad(wanted[0], operands, d_out)
    ends_q, ends_k = (torch.arange(B + 1) * n for n in (S_Q, S_KV))
    for flat in (False, True):
        given = [x.flatten(0, 1) if flat else x for x in operands]
        lengths = (ends_q, ends_k, S_Q, S_KV) if flat else ()
        attend = three.flash_attn_varlen_func if flat else three.flash_attn_func
        out = attend(*given[:3], *lengths, qv=given[3], causal=True, **HERE)
        alike([out.view_as(d_out)], wanted[:1])
        alike(torch.autograd.grad(out, operands, d_out.view_as(out)), true)


def test_heads_of_a_packed_tensor_must_be_said() -> None:
    with pytest.raises(SpecError, match="num_heads_q"):
        three.flash_attn_qkvpacked_func(randn(B, 6, 8, D))


def test_every_function_is_named_and_takes_a_backend() -> None:
    assert len(two.__all__) == 7 and len(three.__all__) == 4
    for door in (two, three):
        for name in door.__all__:
            assert [*inspect.signature(getattr(door, name)).parameters][-1] == "backend"
