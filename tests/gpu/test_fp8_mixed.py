"""Mixed backwards of FP8, by the rule of test_fp8_backward: S and dP of 8 bits, gradients by
products of 16, of weights and dS in bfloat16."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import fp8

from . import oracle
from .test_fp8_backward import NAMES, Case, check, given, scale

pytestmark = pytest.mark.gpu
CASES = [
    Case(heads=(2, 4, 2), sizes=(200, 300), mask="causal", softmax="learnable", dlse=True,
         mixed=True),
    Case(sizes=(129, 257), dims=(80, 112), window=(60, 0), d_o="e4m3", grad="e4m3", scale_s=64.0,
         mixed=True),
    Case(layout="thd", lengths=((70, 0, 200, 33), (100, 20, 64, 300)), dims=(64, 64), o="e5m2",
         grad="e5m2", dropout=0.4, deterministic=True, mixed=True),
    Case(heads=(1, 4, 2), sizes=(300, 300), dims=(32, 48), dtype="e5m2", d_o="e4m3", grad="fp16",
         softcap=5.0, alibi=True, softmax="off_by_one", mixed=True),
    Case(heads=(1, 1, 1), sizes=(65, 129), dims=(16, 16), attn_mask="b1ss", mixed=True),
    Case(sizes=(130, 140), dims=(64, 32), bias="1hss", mask="causal", mixed=True),
]  # fmt: skip
KERNELS = [case.spec for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixed_gradients_are_as_defined(case: Case) -> None:
    made = given(case)
    check(made, made.run())


@pytest.mark.parametrize("case", [CASES[2]], ids=str)
def test_deterministic_mixed_gradients_have_the_same_bits(case: Case) -> None:
    made = given(case)
    first, second = made.run(), made.run()
    assert oracle.same((first[n].float() for n in NAMES), (second[n].float() for n in NAMES))


def test_scale_of_nothing_is_what_16_bits_hold() -> None:
    """Scales that would leave 8 bits nothing change nothing: bfloat16 has the range of float32."""
    made = given(Case(sizes=(64, 70), mixed=True))
    found, small = made.run(), made.run(scale_dp=scale(2.0**-40), descale_dp=scale(2.0**40))
    unscaled = made.run(scale_dp=None, descale_dp=None)
    assert all(torch.equal(found[name], small[name]) for name in NAMES)
    assert all(torch.equal(found[name], unscaled[name]) for name in NAMES)


def test_recipe_has_kernels_differentiate() -> None:
    tensors = [x.requires_grad_() for x in oracle.operands(1, 2, 2, 70, 70, 64, 64, torch.bfloat16)]
    found = {}
    for backward in ("16", "mixed"):
        with fp8.autocast(recipe=fp8.Float8CurrentScaling(fp8.Format.E4M3, backward=backward)):
            out = attngen.attention(*tensors, mask="causal", backend="cuda")
        d_o = oracle.randn(*out.shape, seed=7).to(out.dtype)
        found[backward] = torch.autograd.grad(out, tensors, d_o)
    for got, wide in zip(found["mixed"], found["16"], strict=True):
        error = (got.float() - wide.float()).norm() / wide.float().norm()
        assert 1e-4 < error < 0.05  # of dO in e4m3, and nothing else
