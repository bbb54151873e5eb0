"""Mixed backwards under recipes: S and dP of 8 bits, P and dS of 16."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import SpecError, fp8, reference
from attngen.frontends.pytorch import eight_bits
from tests.support.caches import FORWARD, forget

FORMATS = [fp8.Format.HYBRID, fp8.Format.E4M3]


def operands(d=32):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(1, 40, 2, d, generator=generator).bfloat16() for _ in range(4)]
    *tensors, d_o = made
    return [x.requires_grad_() for x in tensors], d_o


def gradients(recipe, attend=attngen.attention):
    tensors, d_o = operands()
    with fp8.autocast(recipe=recipe):
        out = attend(*tensors, mask="causal")
    return torch.autograd.grad(out, tensors, d_o)


@pytest.mark.parametrize("fp8_format", FORMATS)
def test_recipe_has_the_gradients_of_the_definition(fp8_format):
    (q, k, v), d_o = operands()
    quantisers = [fp8.CurrentQuantizer(fp8_format.forward) for _ in "qkv"]
    quantisers.append(fp8.CurrentQuantizer(fp8_format.backward))
    stored = [each.store(x) for each, x in zip(quantisers, (q, k, v, d_o), strict=True)]
    (q8, *_), (k8, *_), (v8, *_), (d_o8, descale_do) = stored
    scales = {f"descale_{name}": s for name, (_, s) in zip("qkv", stored, strict=False)}
    out, aux = reference.attention(q8, k8, v8, mask="causal", **scales)
    given = reference.BackwardOperands(
        d_o=d_o8, descale_do=descale_do, o=out, lse=aux.lse, mixed=True
    )
    wanted = reference.fp8_backward(given, q8, k8, v8, mask="causal", **scales)
    found = gradients(fp8.Float8CurrentScaling(fp8_format, backward="mixed"))
    for got, expected in zip(found, (wanted.dq, wanted.dk, wanted.dv), strict=True):
        assert torch.equal(got, expected)


def test_what_dq_and_dk_lose_is_the_rounding_of_do():
    wide = gradients(fp8.Float8CurrentScaling(fp8.Format.E4M3))
    errors = []
    for backward in ("mixed", "fp8"):
        found = gradients(fp8.Float8CurrentScaling(fp8.Format.E4M3, backward=backward))
        pairs = zip(found, wide, strict=True)
        errors.append([float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs])
    mixed, narrow = errors
    assert all(one < 0.85 * other for one, other in zip(mixed, narrow, strict=True)), errors


def test_layer_notes_magnitudes_as_in_8_bits():
    recipe = fp8.DelayedScaling(amax_history_len=2, backward="mixed")
    layer = fp8.Attention(2)
    gradients(recipe, layer)
    assert (layer.scales.gradient_history[0] > 0).all()
    gradients(recipe, layer)
    assert (layer.scales.gradient_scale > 0).all()


def test_calls_without_room_are_refused_before_a_launch(monkeypatch):
    forget(monkeypatch, *FORWARD)
    monkeypatch.setattr(eight_bits.routing, "use_kernels", lambda call: True)
    tensors, _ = operands(160)
    recipe = fp8.Float8CurrentScaling(backward="mixed")
    with fp8.autocast(recipe=recipe), pytest.raises(SpecError, match="'mixed' has head dims up to"):
        attngen.attention(*tensors)


def test_other_words_are_refused():
    with pytest.raises(SpecError, match="fp8_or_16, mixed; got 'half'"):
        fp8.Float8CurrentScaling(backward="half")
