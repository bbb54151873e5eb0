"""Backwards in 8 bits under recipes: which scales they have, and what histories learn of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import SpecError, fp8, reference
from attngen.frontends.pytorch import eight_bits
from attngen.reference.fp8_scales import largest, stored
from tests.support.caches import FORWARD, forget

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEPS = 3


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(d=16):
    shapes = (2, 12, 4, d), (2, 12, 2, d), (2, 12, 2, d)
    return [randn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


D_O = randn(2, 12, 4, 16, seed=9)
RECIPES = {
    "current": fp8.Float8CurrentScaling(backward="fp8"),
    "current_e4m3": fp8.Float8CurrentScaling(fp8.Format.E4M3, backward="fp8"),
    "delayed": fp8.DelayedScaling(1, amax_history_len=STEPS, backward="fp8"),
}


def gradients(out, tensors, d_o=D_O):
    return torch.autograd.grad(out, tensors, d_o)


def defined(recipe, scale, scale_dp):
    """The definition's results by scales of dO and dS; scale_dp None for the definition's own."""
    amaxes = [largest(x) for x in operands()]
    scales = [recipe.scale(amax, E4M3) for amax in amaxes]
    q, k, v = (stored(x, E4M3, s) for x, s in zip(operands(), scales, strict=True))
    more = {f"descale_{n}": s.reciprocal() for n, s in zip("qkv", scales, strict=True)}
    more["mask"] = "causal"
    out, aux = reference.attention(q, k, v, **more)
    given = reference.BackwardOperands(
        d_o=stored(D_O, recipe.fp8_format.backward, scale),
        descale_do=scale.reciprocal(),
        o=out,
        lse=aux.lse,
        scale_dp=scale_dp,
        descale_dp=None if scale_dp is None else scale_dp.reciprocal(),
    )
    return reference.fp8_backward(given, q, k, v, **more)


@pytest.mark.parametrize("name", RECIPES)
def test_layer_without_a_history_stores_by_the_calls_own_numbers(name):
    recipe = RECIPES[name]
    layer, tensors = fp8.Attention(STEPS), operands()
    with fp8.autocast(recipe=recipe):
        out = layer(*tensors, mask="causal")
    found = gradients(out, tensors)
    scale = recipe.scale(largest(D_O), recipe.fp8_format.backward)
    wanted = defined(recipe, scale, None)
    for got, expected in zip(found, (wanted.dq, wanted.dk, wanted.dv), strict=True):
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        # Scales of dS are powers of two: they change what is below the smallest normal number.
        assert error < (1e-2 if recipe.fp8_format is fp8.Format.HYBRID else 0.1)
    assert torch.equal(found[2], wanted.dv) and torch.equal(
        layer.scales.gradient_history[0], torch.cat([largest(D_O), wanted.amax_dp])
    )


@pytest.mark.parametrize("name", RECIPES)
def test_next_step_stores_by_the_magnitudes_of_the_one_before(name):
    recipe = RECIPES[name]
    layer, tensors = fp8.Attention(STEPS), operands()
    state = layer.scales
    state.gradient_history[0] = torch.tensor([3.0, 0.25])
    with fp8.autocast(recipe=recipe):
        out = layer(*tensors, mask="causal")
    dtype = recipe.fp8_format.backward
    delayed = isinstance(recipe, fp8.DelayedScaling)
    if delayed:
        scale, scale_dp = (recipe.scale(x, dtype) for x in state.gradient_history[1].split(1))
    else:
        scale = recipe.scale(largest(D_O), dtype)
        scale_dp = torch.tensor([2.0**13 if dtype == E5M2 else 2.0**9])
    assert torch.equal(state.gradient_scale, torch.cat([scale * delayed, scale_dp]))
    wanted = defined(recipe, scale, scale_dp)
    for got, expected in zip(
        gradients(out, tensors), (wanted.dq, wanted.dk, wanted.dv), strict=True
    ):
        assert torch.equal(got, expected)
    assert not state.gradient_history[0].equal(torch.zeros(2)), "the backward notes its own"
    kept = fp8.Attention(STEPS)
    kept.load_state_dict(layer.state_dict())
    assert torch.equal(kept.scales.gradient_scale, state.gradient_scale)


@pytest.mark.parametrize("softmax_scale", [1.0, -30.0])
def test_scale_of_a_call_alone_saturates_nothing(softmax_scale):
    tensors = [x.detach() * 16 for x in operands()]
    tensors = [x.requires_grad_() for x in tensors]
    with fp8.autocast(recipe=RECIPES["current"]):
        out, aux = attngen.attention(*tensors, return_lse=True, softmax_scale=softmax_scale)
    found = torch.autograd.grad(
        (out, aux.lse), tensors, (D_O * 50, randn(2, 4, 12, dtype=torch.float32))
    )
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        wide, of_wide = attngen.attention(*tensors, return_lse=True, softmax_scale=softmax_scale)
    wanted = torch.autograd.grad(
        (wide, of_wide.lse), tensors, (D_O * 50, randn(2, 4, 12, dtype=torch.float32))
    )
    for got, expected in zip(found, wanted, strict=True):
        assert (got.float() - expected.float()).norm() < 0.2 * expected.float().norm()


def test_rows_of_no_sequence_change_nothing():
    tensors, used = operands(), torch.tensor([12, 7], dtype=torch.int32)
    d_o = D_O.clone()
    found = []
    for beyond in (0.0, float("nan")):
        d_o[1, 7:] = beyond
        layer = fp8.Attention(STEPS)
        with fp8.autocast(recipe=RECIPES["current"]):
            out = layer(*tensors, mask="padding", seqused_q=used, seqused_kv=used)
        dq, dk, dv = gradients(out, tensors, d_o)
        found.append((layer.scales.gradient_history[0, 0], dk[1, :7], dv[1, :7]))
    assert all(map(torch.equal, *found))


def test_gradient_of_an_lse_that_is_minus_infinity_changes_nothing():
    """Two such rows that are joined have NaN, which must not count for the scale of dS."""
    tensors, found = operands(), []
    seen = torch.ones(12, 12, dtype=torch.bool)
    seen[3] = False
    for of_unseen in (0.0, float("nan")):
        with fp8.autocast(recipe=RECIPES["current"]):
            out, aux = attngen.attention(*tensors, attn_mask=seen, return_lse=True)
        dlse = torch.zeros_like(aux.lse).masked_fill(aux.lse == -torch.inf, of_unseen)
        found.append(torch.autograd.grad((out, aux.lse), tensors, (D_O * 1e-5, dlse)))
    assert all(map(torch.equal, *found))


def test_stored_tensors_have_the_backward_of_the_recipe_in_force():
    store, tensors = fp8.CurrentQuantizer(E4M3), operands()
    with fp8.autocast(recipe=RECIPES["current"]):
        of_recipe = gradients(attngen.attention(*tensors), tensors)
        out = attngen.attention(*[store(x) for x in tensors])
    for got, expected in zip(gradients(out, tensors), of_recipe, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
def test_compiled_layer_learns_what_the_eager_one_does():
    tensors, found = operands(), []
    for compiled in (False, True):
        layer = fp8.Attention(STEPS)
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        for _ in range(2):
            with fp8.autocast(recipe=RECIPES["delayed"]):
                out = call(*tensors, mask="causal")
            grads = gradients(out, tensors)
        found.append([*grads, layer.scales.gradient_scale, layer.scales.gradient_history])
    assert all(map(torch.equal, *found))
    assert (found[0][-2] > 0).all()


def test_two_forwards_before_their_backwards_share_a_layer():
    layer, tensors = fp8.Attention(STEPS), operands()
    outs = []
    for _ in range(2):
        with fp8.autocast(recipe=RECIPES["delayed"]):
            outs.append(layer(*tensors, mask="causal"))
    one, other = (gradients(out, tensors) for out in outs)
    assert len(one) == len(other) == 3 and layer.scales.gradient_history[0].min() > 0


def test_checkpointed_layer_notes_once_what_the_plain_one_does():
    tensors, found = operands(), []
    for checkpointed in (False, True):
        layer = fp8.Attention(STEPS)
        with fp8.autocast(recipe=RECIPES["current"]):
            more = {"use_reentrant": False, "context_fn": fp8.checkpoint_contexts}
            out = checkpoint(layer, *tensors, **more) if checkpointed else layer(*tensors)
        found.append([*gradients(out, tensors), layer.scales.gradient_history])
    assert all(map(torch.equal, *found))


def test_kernels_refuse_before_a_launch_unless_16_bits_may_stand_in(monkeypatch):
    forget(monkeypatch, *FORWARD)
    monkeypatch.setattr(eight_bits.routing, "use_kernels", lambda call: True)
    seen = []

    def launch(stores, carriers, operands):
        seen.append(stores.form.d_o_dtype)
        return {"o": D_O}

    monkeypatch.setattr(eight_bits.QuantisedCall, "of", lambda *_: launch)
    tensors, bias = operands(256), torch.zeros(1, 1, 12, 12)
    with fp8.autocast(recipe=RECIPES["current"]):
        with pytest.raises(SpecError, match="bias.*a backward of e4m3") as caught:
            attngen.attention(*tensors, bias=bias)
        assert "fp8_or_16" in str(caught.value) and not seen
        attngen.attention(*operands())
    with fp8.autocast(recipe=fp8.Float8CurrentScaling(backward="fp8_or_16")):
        attngen.attention(*tensors, bias=bias)
        attngen.attention(*operands())
    assert seen == ["float8_e5m2", "", "float8_e5m2"]


def test_second_derivatives_are_refused():
    tensors = operands()
    with fp8.autocast(recipe=RECIPES["current"]):
        out = attngen.attention(*tensors)
    (dq,) = torch.autograd.grad(out, tensors[:1], D_O.clone().requires_grad_(), create_graph=True)
    with pytest.raises(SpecError, match="no second derivative"):
        dq.sum().backward()
