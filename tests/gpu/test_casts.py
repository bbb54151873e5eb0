"""Casts to 8 bits: kernels store what the definitions in torch do, bit for bit."""

from __future__ import annotations

import pytest
import torch

from attngen import fp8
from attngen.call.recipe import CastRule
from attngen.frontends.pytorch import narrow
from attngen.reference.fp8_scales import current_scale, largest, stored

from . import oracle

pytestmark = pytest.mark.gpu
RULES = {
    "e4m3": CastRule("float8_e4m3fn"),
    "e5m2-any": CastRule("float8_e5m2", power_of_two=False),
    "e4m3-margin": CastRule("float8_e4m3fn", margin=2, power_of_two=False),
    "e4m3-least": CastRule("float8_e4m3fn", least=50.0),
}
SHAPES = [(2, 40, 3, 32), (1, 1, 1, 16), (5, 200, 4, 64)]


def compare(tensors, rows, rule, known=None):
    found = narrow.by_kernels(tensors, rows, rule, known)
    assert found is not None
    dtype = getattr(torch, rule.dtype)
    for n, (x, used) in enumerate(zip(tensors, rows, strict=True)):
        amax = largest(x, used)
        scale = current_scale(amax, dtype, rule.margin, rule.power_of_two, rule.least)
        if known is not None and known[n] > 0:
            scale = known[n : n + 1]
        pairs = ((found.amax, amax), (found.scale, scale), (found.descale, scale.reciprocal()))
        for got, wanted in pairs:
            assert got[n].shape == (1,)
            assert torch.equal(got[n].nan_to_num(-1), wanted.nan_to_num(-1))
        made, wanted = found.stored[n], stored(x, dtype, scale)
        assert made.stride() == x.stride()
        same = made.view(torch.uint8) == wanted.view(torch.uint8)
        assert bool((same | (made.float().isnan() & wanted.float().isnan())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_tensors_are_stored_as_the_definition_says(rule, dtype):
    tensors = [oracle.randn(*shape).to(dtype) for shape in SHAPES]
    compare(tensors, [None] * 3, rule)


def test_special_numbers_and_empty_tensors():
    inf, nan = float("inf"), float("nan")
    whole = oracle.randn(4, 8, 2, 16).bfloat16()
    for number in (0.0, inf, nan, 2.0**-133, 3e38, -3e38):
        x = whole.clone()
        x[2, 3, 1, 5] = number
        compare([x, torch.full_like(whole, number), whole[:0]], [None] * 3, RULES["e4m3"])


def test_rows_that_belong_to_nobody_count_for_nothing():
    x = oracle.randn(3, 50, 2, 32).bfloat16()
    lengths = torch.tensor([50, 0, 17], device=x.device)
    rows = (torch.arange(50, device=x.device) < lengths[:, None])[:, :, None, None]
    x[1] = float("nan")
    x[2, 17:] = 1000.0
    compare([x, x[:1]], [rows, None], RULES["e4m3"])


def test_scales_that_are_known_are_taken():
    tensors = [oracle.randn(2, 40, 2, 32).bfloat16() for _ in range(3)]
    known = torch.tensor([0.0, 3.0, 1e30], device=tensors[0].device)
    compare(tensors, [None] * 3, RULES["e5m2-any"], known)


def test_axes_in_any_order_and_tensors_that_kernels_leave_alone():
    x = oracle.randn(2, 40, 3, 32).bfloat16()
    compare([x.transpose(1, 2)], [None], RULES["e4m3"])
    for other in (x[:, :, :2], x.double(), x[..., :20].contiguous()):
        assert narrow.by_kernels([other], [None], RULES["e4m3"]) is None
    odd = torch.zeros(x.numel() + 4, dtype=x.dtype, device=x.device)[4:].view(x.shape)
    assert (odd.data_ptr() % 16 != 0) == (narrow.by_kernels([odd], [None], RULES["e4m3"]) is None)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recipes_store_what_they_store_without_kernels(recipe, monkeypatch):
    recipes = {
        "current": fp8.Float8CurrentScaling(backward="fp8"),
        "delayed": fp8.DelayedScaling(amax_history_len=2, backward="fp8"),
    }
    tensors = [x.requires_grad_() for x in oracle.operands(1, 2, 2, 64, 64, 64, 64, torch.bfloat16)]
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(narrow, "_prepare", lambda *_: None)
            narrow.prepared_casts.by_format.clear()
        layer = fp8.Attention(2, device=tensors[0].device)
        for _ in range(2):
            with fp8.autocast(recipe=recipes[recipe]):
                out = layer(*tensors, mask="causal", backend="cuda")
            gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        found.append((out, *gradients, *layer.state_dict().values()))
    narrow.prepared_casts.by_format.clear()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.device
def test_tensor_of_more_than_2_31_numbers():
    x = torch.zeros(1 << 20, 1, 2064, dtype=torch.bfloat16, device=oracle.DEVICE)
    x[-1, 0, -1] = 7.0
    found = narrow.by_kernels([x], [None], RULES["e4m3"])
    assert found is not None and found.amax[0] == 7.0
    assert found.stored[0][-1, 0, -1].float() * found.descale[0] == 7.0
    assert not found.stored[0][:-1].view(torch.uint8).any()
