"""Casts to 8 bits: kernels store what the definitions in torch do, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attngen import fp8
from attngen.call.numbers import Arguments
from attngen.call.recipe import CastRule, GradientForm
from attngen.call.table import INPUTS
from attngen.frontends.pytorch import gradient_casts, narrow, stored_gradients
from attngen.frontends.pytorch.gradient_casts import StoredDO
from attngen.frontends.pytorch.stored_gradients import FP8Call
from attngen.reference import fp8_scales
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


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rows_are_stored_by_scales_of_their_own(rule):
    """Rows of 16 numbers to 256, in memory's order and others, some of them 0, infinite or NaN."""
    rule = rule._replace(by_token=True)
    factors = torch.exp2(torch.arange(48.0, device=oracle.DEVICE) - 20).view(2, 8, 3, 1)
    wide = oracle.randn(2, 8, 3, 256).bfloat16() * factors.bfloat16()
    narrow_rows = oracle.randn(3, 70, 5, 16).bfloat16().transpose(1, 2)
    narrow_rows[0, 1, 2:5] = torch.tensor([[0.0], [float("inf")], [float("nan")]])
    tensors = [wide, narrow_rows, oracle.randn(1, 1, 1, 80).bfloat16()]
    found = narrow.by_kernels(tensors, [None] * 3, rule)
    assert found is not None
    wanted = fp8_scales.narrowed(tensors, [None] * 3, rule)
    for x, made, other, row, of in zip(
        tensors, found.stored, wanted.stored, found.by_row, wanted.by_row, strict=True
    ):
        assert made.stride() == x.stride() and torch.equal(row, of)
        same = made.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
        assert bool((same | (made.float().isnan() & other.float().isnan())).all())


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
            leave_kernels(monkeypatch)
        layer = fp8.Attention(2, device=tensors[0].device)
        for _ in range(3):
            with fp8.autocast(recipe=recipes[recipe]):
                out = layer(*tensors, mask="causal", backend="cuda")
            gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        found.append((out, *gradients, *layer.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def leave_kernels(monkeypatch):
    """Have torch's operations store tensors and end steps."""
    monkeypatch.setattr(narrow, "by_kernels", lambda *_: None)
    monkeypatch.setattr(stored_gradients, "stored_d_o", lambda *_: None)
    monkeypatch.setattr(narrow, "device_arch", lambda _: None)
    gradient_casts.prepared_steps.recent.clear()


INF, NAN = float("inf"), float("nan")
LENGTHS = torch.tensor([37, 0], dtype=torch.int32)
# Largest magnitudes of dO and of V, and of a gradient of the LSE; what a layer knows and has noted.
GIVEN = {
    "plain": (3.0, 2.0, None, None),
    "with-an-lse": (3.0, 2.0, 1e3, None),
    "of-a-layer": (0.25, 2.0, None, ([0.0, 0.0], [9.0, 9.0])),
    "known": (0.25, 2.0, 5.0, ([0.5, 2.0**20], [0.0, 0.0])),
    "nothing": (0.0, 2.0, None, ([0.0, 0.0], [0.0, 0.0])),
    "no-v": (3.0, 0.0, None, None),
    "infinite": (INF, 2.0, None, ([0.0, 0.0], [1.0, 1.0])),
    "nan": (NAN, 2.0, None, ([0.0, 0.0], [1.0, 1.0])),
    "nan-in-v": (1.0, NAN, None, None),
    "tiny": (1e-38, 2.0**-9, None, None),
    "lengths": (3.0, 2.0, 4.0, ([0.0, 0.0], [1.0, 1.0])),
}


def fp8_call(given, form, v_dtype):
    """A call of FP8 operands, and the gradients of its output and its LSE, of these magnitudes."""
    of_d_o, of_v, of_lse, of_layer = given
    d_o, v, q = (oracle.randn(2, 40, n, 32).clamp(-1, 1) for n in (4, 2, 4))
    d_o[0, 36, 1, 7], v[0, 36, 1, 7] = of_d_o, of_v
    d_o, v = (d_o * (of_d_o != 0)).bfloat16(), (v * (of_v != 0)).to(v_dtype)
    dlse = None
    if of_lse is not None:
        dlse = oracle.randn(2, 4, 40)
        dlse[0, 3, 36] = of_lse
    lse = torch.zeros(2, 4, 40, device=q.device)
    operands = dict.fromkeys(INPUTS) | {"q": q.to(v_dtype), "k": v, "v": v}
    operands["descale_v"] = torch.tensor([0.75], device=q.device)
    layer = [None, None] if of_layer is None else [torch.tensor(x) for x in of_layer]
    layer = [None if x is None else x.to(q.device) for x in layer]
    arguments = Arguments(layout="bshd", dropout_p=0.25)
    return FP8Call(True, True, form, *layer, d_o, lse, [*operands.values()], arguments), d_o, dlse


@pytest.mark.parametrize("name", GIVEN)
def test_scale_of_ds_is_the_definition_s(name):
    for form, v_dtype in (
        (GradientForm("float8_e5m2"), torch.float8_e4m3fn),
        (GradientForm("float8_e4m3fn", 1, False), torch.float8_e5m2),
    ):
        call, d_o, dlse = fp8_call(GIVEN[name], form, v_dtype)
        if name == "lengths":
            lengths = LENGTHS.to(d_o.device)
            used = {INPUTS.index(f"seqused_{side}"): lengths for side in ("q", "kv")}
            operands = [used.get(place, x) for place, x in enumerate(call.operands)]
            call = replace(call, operands=operands)
            d_o[:, 37:], call.operands[INPUTS.index("v")].view(torch.uint8)[:, 38:] = NAN, 0x7F
        before = None if call.amax is None else call.amax.clone()
        _, margin, power_of_two, least, _ = form
        rule = CastRule(form.d_o_dtype, least, margin, power_of_two)
        found = call._by_kernels(d_o, dlse, rule)
        rows = call._rows([*"bshd"], "q", d_o)
        known = None if call.scale is None else call.scale[:1]
        (made,), numbers, _ = fp8_scales.narrowed([d_o], [rows], rule, known)
        amax, _, descale = numbers[:, 0].unbind()
        scale = call._own_scale_dp(amax, dlse, made.dtype)
        if call.scale is not None and call.scale[1] > 0:
            scale = call.scale[1:]
        wanted = StoredDO(made, descale, scale, scale.reciprocal())
        for got, like in zip(found, wanted, strict=True):
            assert got.shape == like.shape
            assert torch.equal(got.float().nan_to_num(-1), like.float().nan_to_num(-1))
        if before is not None:
            noted = torch.stack([torch.maximum(before[:1], amax)[0], before[1]])
            assert torch.equal(call.amax.nan_to_num(-1), noted.nan_to_num(-1))


@pytest.mark.parametrize(
    "recipe",
    [
        fp8.Float8CurrentScaling(backward="fp8"),
        fp8.Float8CurrentScaling(fp8.Format.E4M3, backward="fp8"),
        fp8.DelayedScaling(margin=1, amax_history_len=700, backward="fp8"),
        fp8.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", backward="fp8"),
    ],
    ids=["current", "current-e4m3", "max", "most-recent"],
)
def test_a_step_ends_as_the_definition_says(recipe, monkeypatch):
    delayed = isinstance(recipe, fp8.DelayedScaling)
    steps = recipe.amax_history_len if delayed else 16
    rows = oracle.randn(6, 2).abs() * 2.0 ** torch.arange(-60, 60, 20.0)[:, None].to(oracle.DEVICE)
    rows[1], rows[2, 1], rows[3, 1], rows[4, 0] = 0.0, INF, NAN, 1e-45
    found = []
    for kernels in (True, False):
        if not kernels:
            leave_kernels(monkeypatch)
        layer = fp8.Attention(steps, device=oracle.DEVICE)
        states = []
        for row in rows:
            layer.scales.gradient_history[0] = row
            layer.scales.amax_history[0, :2] = row
            layer.scales.update_gradients(recipe)
            if delayed:
                layer.scales.update(recipe)
            states += [x.clone() for x in layer.state_dict().values()]
        found.append(states)
    assert all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in zip(*found, strict=True))


def test_scale_of_ds_is_the_call_s_until_a_backward_has_noted():
    layer = fp8.Attention(2, device=oracle.DEVICE)
    layer.scales.update_gradients(fp8.Float8CurrentScaling(backward="fp8"))
    assert not layer.scales.gradient_scale.any()


@pytest.mark.slow
@pytest.mark.device
def test_tensor_of_more_than_2_31_numbers():
    x = torch.zeros(1 << 20, 1, 2064, dtype=torch.bfloat16, device=oracle.DEVICE)
    x[-1, 0, -1] = 7.0
    found = narrow.by_kernels([x], [None], RULES["e4m3"])
    assert found is not None and found.amax[0] == 7.0
    assert found.stored[0][-1, 0, -1].float() * found.descale[0] == 7.0
    assert not found.stored[0][:-1].view(torch.uint8).any()
