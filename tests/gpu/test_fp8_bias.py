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


KERNELS = [spec_of(case, more) for case, _, _, more in CASES]


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
    recipe = fp8.Float8CurrentScaling(backward="fp8")
    refused = pytest.raises(SpecError, match="bias has no kernels of a backward")
    with refused, fp8.autocast(recipe=recipe):
        gradients()
