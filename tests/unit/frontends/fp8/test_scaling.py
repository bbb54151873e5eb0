"""`autocast` and layers: which recipe is in force, and when histories and scales move."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import SpecError, fp8, reference
from attngen.call.recipe import in_force
from attngen.frontends.pytorch import narrow, routing

E4M3 = torch.float8_e4m3fn
STEPS = 3


def randn(*shape, seed=0, size=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    return x.bfloat16()


def operands(size=1.0, seed=0):
    return [
        randn(2, 12, h, 16, seed=seed + n, size=size).requires_grad_()
        for n, h in enumerate((4, 2, 2))
    ]


def delayed(**more):
    return fp8.autocast(recipe=fp8.DelayedScaling(amax_history_len=STEPS, **more))


def step(layer, context, tensors):
    with context:
        out = layer(*tensors, mask="causal")
    return out, *torch.autograd.grad(out.float().square().sum(), tensors)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_default_is_current_scaling_in_powers_of_two():
    q, k, v = (x.detach() for x in operands())
    with fp8.autocast():
        out = attngen.attention(q, k, v)
    stored, scales = [], {}
    for name, x in zip("qkv", (q, k, v), strict=True):
        scale = 2.0 ** math.floor(math.log2(448 / x.abs().max().item()))
        stored.append((x.float() * scale).to(E4M3))
        scales[f"descale_{name}"] = torch.tensor([1 / scale])
    assert torch.equal(out, reference.attention(*stored, **scales)[0])
    assert not torch.equal(out, attngen.attention(q, k, v))


def test_context_ends_with_itself_whatever_happens():
    with fp8.autocast():
        outer = in_force.recipe
        with fp8.autocast(enabled=False):
            assert in_force.recipe is None
        with pytest.raises(ZeroDivisionError), delayed():
            assert in_force.recipe is not outer
            raise ZeroDivisionError
        assert in_force.recipe is outer
    assert in_force.recipe is None
    context = fp8.autocast()
    for _ in range(2):
        with context, context:
            assert in_force.recipe is not None
        assert in_force.recipe is None


def test_delayed_scaling_needs_a_layer_and_one_of_its_history():
    with delayed():
        with pytest.raises(SpecError, match=r"attngen.fp8.Attention\(\)"):
            attngen.attention(*operands())
        with pytest.raises(SpecError, match="keeps 7 steps, the recipe 3"):
            fp8.Attention(amax_history_len=7)(*operands())
        assert in_force.recipe.used == []


def test_layer_without_a_recipe_is_attention():
    tensors, layer = operands(), fp8.Attention()
    assert torch.equal(layer(*tensors), attngen.attention(*tensors))
    with fp8.autocast():
        assert torch.equal(layer(*tensors), attngen.attention(*tensors))
    assert not layer.scales.amax_history.any() and not layer.scales.scale.any()


def test_first_step_has_its_own_scales_and_later_ones_those_of_the_history():
    layer, sizes = fp8.Attention(STEPS), (1.0, 4.0, 0.5, 0.5, 0.5)
    current = fp8.autocast(recipe=fp8.Float8CurrentScaling(use_power_2_scales=False))
    maxima = []
    for n, size in enumerate(sizes):
        tensors = operands(size, seed=3 * n)
        known = layer.scales.scale.clone()
        found = step(layer, delayed(), tensors)
        if not n:
            assert same(found, step(attngen.attention, current, tensors))
        else:
            recent = torch.tensor(maxima[-STEPS:]).amax(0)
            torch.testing.assert_close(known, 448 / recent)
        maxima.append([x.abs().max().item() for x in tensors])
    assert len({x.item() for x in layer.scales.scale}) == 3, "each operand has its own"


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_algorithm_and_margin_decide_the_next_scale(algorithm):
    layer = fp8.Attention(STEPS)
    for size in (4.0, 1.0):
        step(layer, delayed(amax_compute_algo=algorithm, margin=1), operands(size))
    largest = 4.0 if algorithm == "max" else 1.0
    wanted = [224 / (x.float() * largest).abs().max().item() for x in operands()]
    assert layer.scales.scale.tolist() == pytest.approx(wanted, rel=2**-7)


def test_calls_of_one_step_join_and_the_outermost_context_ends_it():
    layer = fp8.Attention(STEPS)
    with delayed():
        for size in (1.0, 4.0, 2.0):
            with delayed():
                layer(*operands(size))
        assert not layer.scales.scale.any()
    wanted = [448 / x.abs().max().item() for x in operands(4.0)]
    assert layer.scales.scale.tolist() == pytest.approx(wanted)
    assert not layer.scales.amax_history[0].any() and layer.scales.amax_history[1].all()
    assert not layer.scales.amax_history[2].any()


def test_step_ends_as_defined_where_kernels_convert_nothing_to_8_bits(monkeypatch):
    layers = [fp8.Attention(STEPS), fp8.Attention(STEPS)]
    step(layers[0], delayed(), operands())
    monkeypatch.setattr(narrow, "device_arch", lambda _: "sm_80")
    step(layers[1], delayed(), operands())
    wanted, found = (layer.state_dict() for layer in layers)
    assert wanted and same(found.values(), wanted.values())


def test_evaluation_moves_nothing():
    layer = fp8.Attention(STEPS)
    step(layer, delayed(), operands())
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    with torch.no_grad(), delayed():
        layer(*operands(7.0))
    assert same(layer.state_dict().values(), before.values())


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan])
def test_magnitudes_that_are_none_leave_the_scale(wrong):
    layer = fp8.Attention(STEPS)
    step(layer, delayed(), operands())
    before = layer.scales.scale.clone()
    tensors = [torch.full_like(x, wrong).requires_grad_() for x in operands()]
    with delayed(amax_compute_algo="most_recent"):
        layer(*tensors)
    assert torch.equal(layer.scales.scale, before)


def test_packed_tensors_share_their_scale():
    layer = fp8.Attention(STEPS)
    packed = randn(2, 12, 3, 2, 16).requires_grad_()
    with delayed():
        layer(packed, layout="bs3hd").sum().backward()
    assert len({*layer.scales.scale.tolist()}) == 1 and packed.grad.any()
    q, kv = randn(2, 12, 4, 16).requires_grad_(), randn(2, 12, 2, 2, 16, seed=1)
    with delayed():
        layer(q, kv, layout="bshd_bs2hd")
    scale_q, scale_k, scale_v = layer.scales.scale.tolist()
    assert scale_k == scale_v and scale_q > 0


CU = torch.tensor([0, 5, 9], dtype=torch.int32)
STARTS = torch.tensor([1, 8, 14], dtype=torch.int32)
PADDED = {
    "seqused": (
        ((2, 12, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16)),
        {"mask": "padding_causal", "seqused_q": CU.diff(), "seqused_kv": CU.diff()},
        lambda x: [x[0, 5:], x[1, 4:]],
    ),
    "sbhd": (
        ((12, 2, 4, 16), (12, 2, 2, 16), (12, 2, 2, 16)),
        {"layout": "sbhd", "mask": "padding", "cu_seqlens_q": CU, "cu_seqlens_kv": CU},
        lambda x: [x[5:, 0], x[4:, 1]],
    ),
    "thd": (
        ((14, 4, 16), (14, 2, 16), (14, 2, 16)),
        {"layout": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU},
        lambda x: [x[9:]],
    ),
    "gaps": (
        ((14, 3, 2, 16),),
        {"layout": "t3hd", "cu_seqlens_q": CU, "cu_seqlens_q_padded": STARTS},
        lambda x: [x[:1], x[6:8], x[12:]],
    ),
}


@pytest.mark.parametrize("context", [fp8.autocast, delayed])
@pytest.mark.parametrize("case", PADDED)
def test_rows_of_no_sequence_change_nothing(case, context):
    shapes, arguments, parts = PADDED[case]
    results = []
    for filling in (0.0, 1e30, math.nan):
        tensors = [randn(*shape, seed=n) for n, shape in enumerate(shapes)]
        for part in (part for x in tensors for part in parts(x)):
            part.fill_(filling)
        layer = fp8.Attention(STEPS)
        for x in tensors:
            x.requires_grad_()
        with context():
            out = layer(*tensors, **arguments)
        gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        results.append((out, *gradients, *layer.state_dict().values()))
        assert all(x.isfinite().all() and x.any() for x in (out, *gradients))
    assert same(results[1], results[0]) and same(results[2], results[0])


def test_lengths_that_do_not_fit_are_named_by_the_checks():
    q, k, v = operands()
    wrong = {"seqused_q": torch.ones(3).int(), "seqused_kv": torch.ones(2, 2).int()}
    with fp8.autocast(), pytest.raises(SpecError) as caught:
        attngen.attention(q, k, v, mask="padding", **wrong)
    assert [x.partition(" ")[0] for x in caught.value.reasons] == ["seqused_q", "seqused_kv"]


def test_state_goes_through_a_state_dict():
    layer = fp8.Attention(STEPS)
    for n in range(2):
        step(layer, delayed(), operands(2.0**n, seed=n))
    copy = fp8.Attention(STEPS)
    copy.load_state_dict(layer.state_dict())
    names = ("amax_history", "gradient_history", "gradient_scale", "scale")
    assert sorted(layer.state_dict()) == [f"scales.{name}" for name in names]
    tensors = operands(seed=9)
    assert same(step(layer, delayed(), tensors), step(copy, delayed(), tensors))
    assert same(layer.state_dict().values(), copy.state_dict().values())


def test_state_stays_float32_when_a_model_is_cast():
    layer = fp8.Attention(STEPS)
    step(layer, delayed(), operands())
    before = layer.scales.scale.clone()
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2)).to(torch.bfloat16)
    assert model[1].weight.dtype == torch.bfloat16
    assert layer.scales.scale.dtype == layer.scales.amax_history.dtype == torch.float32
    assert torch.equal(layer.scales.scale, before)
    assert layer.to("meta").scales.scale.device.type == "meta"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("context", [fp8.autocast, delayed])
def test_compiled_layer_equals_the_eager_one(context):
    torch._dynamo.reset()
    layers = fp8.Attention(STEPS), fp8.Attention(STEPS)
    eager, inner = layers
    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    for n in range(3):
        tensors = operands(2.0**n, seed=n)
        assert same(step(compiled, context(), tensors), step(eager, context(), tensors))
        assert same(inner.state_dict().values(), eager.state_dict().values())


@pytest.mark.slow
def test_context_inside_of_compiled_code_works():
    torch._dynamo.reset()

    def attend(q, k, v):
        with fp8.autocast():
            return attngen.attention(q, k, v)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands()), attend(*operands()))
    assert in_force.recipe is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("context", [fp8.autocast, delayed])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_checkpointed_layer_recomputes_with_the_scales_of_its_forward(context, inside):
    results = []
    for checkpointed in (False, True):
        layer = fp8.Attention(STEPS)
        step(layer, context(), operands(3.0))  # whose scales are others
        tensors = operands(seed=5)
        with context():
            if checkpointed:
                out = checkpoint(
                    lambda *x, layer=layer: layer(*x, mask="causal").sin(),
                    *tensors,
                    use_reentrant=False,
                    context_fn=fp8.checkpoint_contexts,
                )
            else:
                out = layer(*tensors, mask="causal").sin()
            if inside:
                found = torch.autograd.grad(out.float().sum(), tensors)
        if not inside:
            found = torch.autograd.grad(out.float().sum(), tensors, retain_graph=True)
            assert same(found, torch.autograd.grad(out.float().sum(), tensors)), "twice"
        results.append((out, *found, *layer.state_dict().values()))
    assert same(*results)


def test_checkpoint_contexts_without_a_recipe_do_nothing():
    tensors = operands()
    out = checkpoint(
        attngen.attention, *tensors, use_reentrant=False, context_fn=fp8.checkpoint_contexts
    )
    assert torch.equal(out, attngen.attention(*tensors))


def test_values_are_named_under_check(monkeypatch):
    monkeypatch.setattr(routing, "CHECK_VALUES", True)
    q, k, v = (x.detach().to(E4M3) for x in operands())
    scales = {"descale_q": math.nan, "descale_k": -1.0, "descale_v": math.inf}
    with pytest.raises(SpecError) as caught:
        attngen.attention(q, k, v, **{n: torch.tensor([x]) for n, x in scales.items()})
    reasons = caught.value.reasons
    assert [x.partition(":")[0] for x in reasons] == [
        *("descale_q[0]=nan", "descale_k[0]=-1", "descale_v[0]=inf"),
    ]
    with fp8.autocast():
        attngen.attention(*operands())


def test_names_load_on_first_use():
    assert attngen.fp8 is fp8 and "fp8" in dir(attngen)
    assert all(hasattr(fp8, name) for name in fp8.__all__)
