"""Numbers at the ends of float32: large products, descales of 0 or nearly, scales that overflow.

No input whose products and scores are finite in float32 gives NaN, in kernels of 16 bits, of 8
bits, of 8-bit keys beside 16-bit queries, and of split keys; results are the reference's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import reference

from . import oracle

pytestmark = pytest.mark.gpu
TINY = {"zero": 0.0, "denormal": 1e-40, "least": 2.0**-126, "small": 1e-30}


def whole(*sizes: int, seed: int, most: int = 2) -> Tensor:
    """Small whole numbers, float32."""
    return oracle.randn(*sizes, dtype=torch.float32, seed=seed).round().clamp(-most, most)


def number(value: float) -> Tensor:
    return torch.tensor([value], device=oracle.DEVICE)


def check(found: Tensor, wanted: Tensor, eps: float) -> None:
    """Asserts equality to some roundings of the largest number."""
    assert not found.float().isnan().any(), f"{int(found.float().isnan().sum())} NaN"
    error = oracle.largest((found.float() - wanted.float()).abs())
    limit = 4 * eps * oracle.largest(wanted.float().abs()) + 1e-30
    assert error <= limit, f"error {error:.3e} > {limit:.3e}"


def check_lse(found: Tensor, wanted: Tensor) -> None:
    assert (found.isfinite() == wanted.isfinite()).all()
    seen = wanted.isfinite()
    error = (found - wanted)[seen].abs() / wanted[seen].abs().clamp(min=1)
    assert oracle.largest(error) <= 1e-3


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("power", [5, 12, 24, 60])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_large_products_of_16_bits_have_the_references_output(d: int, power: int, mask: str):
    q, k = (whole(2, 150, n, d, seed=n).bfloat16() * 2.0**power for n in (4, 2))
    v = oracle.randn(2, 150, 2, d, dtype=torch.bfloat16, seed=3)
    more: dict[str, Any] = {"mask": mask, "softmax_scale": 0.125}
    wanted, aux = reference.attention(q.float(), k.float(), v.float(), **more)
    out, lse = attngen.attention(q, k, v, **more, return_lse=True, backend="cuda")
    check(out, wanted, 2**-7)
    check_lse(lse.lse, aux.lse)


@pytest.mark.parametrize("power", [5, 12, 24, 60])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_large_products_of_16_bits_have_finite_gradients(d: int, power: int):
    """Where an LSE says less than a weight needs, rows may have no gradient, but never NaN."""
    q, k = (whole(2, 100, n, d, seed=n).bfloat16() * 2.0**power for n in (4, 2))
    v = oracle.randn(2, 100, 2, d, dtype=torch.bfloat16, seed=3)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attngen.attention(*inputs, mask="causal", softmax_scale=2.0**-100, backend="cuda")
    for gradient in torch.autograd.grad(out, inputs, torch.ones_like(out)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_equal_large_scores_of_split_keys_are_weighed_by_their_number(splits: int):
    q = torch.full((2, 1, 8, 128), 2.0**12, device=oracle.DEVICE, dtype=torch.bfloat16)
    k = torch.full((2, 290, 2, 128), 2.0**12, device=oracle.DEVICE, dtype=torch.bfloat16)
    v = oracle.randn(2, 290, 2, 128, dtype=torch.bfloat16, seed=3)
    out, aux = attngen.attention(q, k, v, num_splits=splits, return_lse=True, backend="cuda")
    wanted, expected = reference.attention(q.float(), k.float(), v.float())
    check(out, wanted, 2**-7)
    check_lse(aux.lse, expected.lse)


def eight_bits(d: int) -> list[Tensor]:
    """q, k, v in e4m3."""
    sizes = ((2, 150, 4, d), (2, 200, 2, d), (2, 200, 2, d))
    return [whole(*size, seed=n).to(torch.float8_e4m3fn) for n, size in enumerate(sizes)]


SCORES: list[dict[str, Any]] = [
    {}, {"mask": "causal"}, {"alibi_slopes": True}, {"softcap": 5.0}, {"window": (40, 0)},
    {"softmax": "off_by_one", "softcap": 20.0, "alibi_slopes": True},
]  # fmt: skip
EACH_SCORES = pytest.mark.parametrize("more", SCORES, ids=lambda more: "-".join(more) or "plain")


@EACH_SCORES
@pytest.mark.parametrize("tiny", TINY)
@pytest.mark.parametrize("d", [64, 128])
def test_tiny_descales_of_8_bits_make_scores_of_zero(d: int, tiny: str, more: dict[str, Any]):
    scales = {"descale_q": number(TINY[tiny]), "descale_k": number(3.0)}
    wanted, expected = reference.attention(*eight_bits(d), **scales, **more)
    out, aux = attngen.attention(*eight_bits(d), **scales, **more, return_lse=True, backend="cuda")
    check(out, wanted, 2**-5)
    check_lse(aux.lse, expected.lse)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("scale", [2.0**4, 2.0**12, 2.0**66, 2.0**100])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_large_descales_of_8_bits_pick_the_largest_score(d: int, scale: float, mask: str):
    """Up to scores of 2^24; beyond, which is no number of 13 bits, they are finite."""
    scales = {"descale_q": number(scale), "softmax_scale": 0.125}
    wanted, expected = reference.attention(*eight_bits(d), **scales, mask=mask)
    out, aux = attngen.attention(
        *eight_bits(d), **scales, mask=mask, return_lse=True, backend="cuda"
    )
    if scale > 2.0**20:
        assert out.isfinite().all()
    else:
        check(out, wanted, 2**-5)
        check_lse(aux.lse, expected.lse)


@pytest.mark.parametrize("scale_s", [0.0, 1e-40, 1e-20, 1.0, 448.0, 1e20, 3e38])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_scales_of_weights_may_be_anything(d: int, mask: str, scale_s: float):
    scales = {"scale_s": number(scale_s), "descale_s": number(0.5 if scale_s > 1 else 1.0)}
    wanted, expected = reference.attention(*eight_bits(d), **scales, mask=mask)
    out, aux = attngen.attention(
        *eight_bits(d), **scales, mask=mask, return_lse=True, backend="cuda"
    )
    check_lse(aux.lse, expected.lse)
    if scale_s > 448:  # what is cut depends on the largest score so far
        assert out.isfinite().all()
    else:
        check(out, wanted, 2**-5)


@pytest.mark.parametrize("scale_o", [0.0, 1e-40, 1e10, 3e38])
@pytest.mark.parametrize("descale_v", [0.0, 1e-38, 1e-10, 1.0])
def test_scales_of_an_8_bit_output_saturate(scale_o: float, descale_v: float):
    q, k, v = eight_bits(64)
    v = (v.float().abs() + 1).to(v.dtype)  # no output is so near 0 that its sign is rounding's
    more: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "descale_v": number(descale_v)}
    wanted, _ = reference.attention(q, k, v, scale_o=number(scale_o), **more)
    out = attngen.attention(q, k, v, scale_o=number(scale_o), **more, backend="cuda")
    check(out, wanted, 2**-3)


@EACH_SCORES
@pytest.mark.parametrize("tiny", TINY)
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_tiny_descales_of_keys_beside_16_bits(splits: int | None, tiny: str, more: dict[str, Any]):
    """Prompts where splits is None, else few queries."""
    q = whole(2, 4 if splits else 150, 4, 128, seed=1).bfloat16()
    _, k, v = eight_bits(128)
    given = {"descale_k": number(TINY[tiny]), "descale_v": number(2.0), **more}
    wanted, expected = reference.attention(q, k, v, **given)
    out, aux = attngen.attention(
        q, k, v, **given, num_splits=splits, return_lse=True, backend="cuda"
    )
    check(out, wanted, 2**-5)
    check_lse(aux.lse, expected.lse)
