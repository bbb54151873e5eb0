"""Biases of FP8 calls: outputs against float64, any broadcast, stride and length; gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import attngen
from attngen import SpecError, fp8

from . import oracle, oracle_fp8, varlen
from .cases_fp8 import Fp8Case
from .test_bias import placed, sizes_of
from .test_dropout import rng_state
from .test_fp8_backward import Case, check, given

pytestmark = pytest.mark.gpu
CASES: list[tuple[Fp8Case, str, str, dict[str, Any]]] = [
    (Fp8Case(128, 128, mask="causal", heads=(2, 4, 2), lengths=(130, 201)), "1hss", "odd", {}),
    (Fp8Case(64, 64, heads=(2, 2, 1), lengths=(100, 160)), "b1ss", "turned", {}),
    (Fp8Case(64, 112, kv_dtype="e5m2", heads=(1, 3, 3), lengths=(70, 128), out_dtype="e4m3",
             scaled=True), "111s", "packed", {}),
    (Fp8Case(256, 256, mask="causal", heads=(1, 2, 1), lengths=(90, 100)), "bhss", "padded", {}),
    (Fp8Case(128, 128, window=(50, 20), heads=(1, 2, 2), lengths=(150, 150)), "11ss", "padded",
     {"softcap": 5.0, "dropout_p": 0.25}),
]  # fmt: skip
IDS = [f"d{case.d}x{case.d_v}-{shape}-{place}" for case, shape, place, _ in CASES]


def spec_of(case: Fp8Case, more: dict[str, Any]) -> attngen.AttentionSpec:
    return dataclasses.replace(
        case.spec, bias="post_scale", dropout="dropout_p" in more, softcap="softcap" in more
    )


GRADIENTS = [
    Case(heads=(2, 4, 2), sizes=(200, 296), bias="1hss", mask="causal", softmax="learnable"),
    Case(heads=(2, 2, 1), sizes=(130, 201), dims=(64, 64), bias="111s", deterministic=True),
    Case(layout="thd", lengths=((70, 0, 200, 33), (70, 0, 200, 33)), bias="bhss", mask="causal",
         grad="e5m2", alibi=True),
    Case(heads=(2, 2, 1), sizes=(100, 160), dims=(96, 80), bias="b1ss", dtype="e5m2", d_o="e4m3",
         softcap=5.0, dropout=0.25),
    Case(sizes=(130, 260), bias="11ss", attn_mask="b1ss", window=(60, 20), scale_s=64.0,
         deterministic=True),
]  # fmt: skip
KERNELS = [*(spec_of(case, more) for case, _, _, more in CASES), *(case.spec for case in GRADIENTS)]


def bias_of(shape: str, full: tuple[int, ...], place: str = "packed") -> torch.Tensor:
    """A random bias, bfloat16."""
    x = oracle.randn(*sizes_of(shape, full), dtype=torch.float32, seed=50).bfloat16()
    return placed(x, place)


@pytest.mark.parametrize(("case", "shape", "place", "more"), CASES, ids=IDS)
def test_fp8_forward_with_a_bias_is_right(case, shape, place, more):
    batch, heads, _ = case.heads
    bias = bias_of(shape, (batch, heads, *case.lengths), place)
    state = {"rng_state": rng_state()} if "dropout_p" in more else {}
    oracle_fp8.check_call(*case.operands(), **case.arguments, bias=bias, **more, **state)


def test_fp8_bias_of_packed_sequences_is_of_their_own_positions():
    q_lens, kv_lens, heads, d = (70, 0, 33), (90, 5, 140), 2, 64
    made = [oracle.randn(sum(n), heads, d, dtype=torch.float32, seed=i)
            for i, n in enumerate((q_lens, kv_lens, kv_lens))]  # fmt: skip
    q, k, v = (x.to(torch.float8_e4m3fn) for x in made)
    bias = bias_of("bhss", (3, heads, max(q_lens), max(kv_lens)))
    out, aux = attngen.attention(
        q, k, v, bias=bias, layout="thd", backend="cuda", return_lse=True,
        cu_seqlens_q=varlen.int32((0, 70, 70, 103)), cu_seqlens_kv=varlen.int32((0, 90, 95, 235)),
    )  # fmt: skip
    for b, rows, keys in ((0, slice(0, 70), slice(0, 90)), (2, slice(70, 103), slice(95, 235))):
        own = bias[b : b + 1, :, : q_lens[b], : kv_lens[b]]
        alone = oracle_fp8.truth(q[None, rows], k[None, keys], v[None, keys], bias=own)
        oracle_fp8.check(out[None, rows], aux.lse[None, :, rows], alone)


def test_fp8_bias_of_another_dtype_is_cast():
    q, k, v = oracle_fp8.operands(1, 2, 2, 70, 64, 64)
    bias = oracle.randn(1, 2, 70, 64, dtype=torch.float32, seed=3)
    wide = attngen.attention(q, k, v, bias=bias, backend="cuda")
    assert torch.equal(wide, attngen.attention(q, k, v, bias=bias.bfloat16(), backend="cuda"))
    with pytest.raises(SpecError, match="bias needs bfloat16"):
        torch.ops.attngen.forward(q, k, v, bias=bias)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_in_8_bits_are_as_defined(case):
    made = given(case)
    check(made, made.run())


def test_lowest_numbers_of_a_bias_make_no_nan():
    made = given(Case(heads=(1, 1, 1), sizes=(70, 130), dims=(64, 64), bias="bhss"), lowest=True)
    check(made, made.run())
    bias = made.arguments["bias"]
    highest = torch.where(torch.arange(70, device=bias.device)[:, None] == 5, -bias, bias)
    changed = dataclasses.replace(made, arguments={**made.arguments, "bias": highest})
    lse = made.backward.lse.clone()
    lse[..., 5] *= -1
    assert all(x.float().isfinite().all() for x in changed.run(lse=lse).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_under_a_recipe_gets_its_gradient(dtype):
    q, k, v = oracle.operands(1, 2, 1, 70, 100, 64, 64, dtype, "bshd")
    bias = oracle.randn(1, 2, 70, 100, dtype=dtype, seed=3)
    given = [x.requires_grad_() for x in (q, k, v, bias)]
    d_o = oracle.randn(*q.shape, dtype=dtype, seed=9)

    def gradients():
        *operands, bias = given
        out = attngen.attention(*operands, bias=bias, mask="causal_bottom_right", backend="cuda")
        return torch.autograd.grad(out, given, d_o)

    with fp8.autocast():
        found = gradients()
    for x, wide, operand in zip(found, gradients(), given, strict=True):
        assert x.dtype == operand.dtype
        assert (x - wide).float().norm() <= 0.15 * wide.float().norm()
    with fp8.autocast(recipe=fp8.Float8CurrentScaling(backward="fp8")):
        in_8_bits = gradients()
    for x, narrow, operand in zip(in_8_bits, found, given, strict=True):
        assert x.dtype == operand.dtype
        assert (x - narrow).float().norm() <= 0.15 * narrow.float().norm()
    assert not torch.equal(in_8_bits[0], found[0])  # by other kernels


def test_bias_of_wide_heads_has_no_backward_in_8_bits():
    q, k, v = oracle.operands(1, 1, 1, 64, 64, 144, 144, torch.bfloat16, "bshd")
    bias = oracle.randn(1, 1, 64, 64, dtype=torch.bfloat16, seed=3).requires_grad_()
    recipe = fp8.Float8CurrentScaling(backward="fp8")
    refused = pytest.raises(SpecError, match="up to head dim 128")
    with refused, fp8.autocast(recipe=recipe):
        attngen.attention(q, k, v, bias=bias, backend="cuda")
