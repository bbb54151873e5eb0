"""Gradients in 16 bits of FP8 forwards, on the kernels of both: against the definition in float64.

The rule of gradients.py has no emulation of 8 bits. What is new here is which numbers the backward
gets, so it is compared with `reference.fp8_backward` of the same stored numbers, output and LSE,
within what 16-bit weights and dS may lose.
"""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import fp8 as fp8_front
from attngen import reference
from attngen.call.recipe import Quantised, in_force
from attngen.reference import BackwardOperands, fp8, fp8_backward
from tests.support.caches import BACKWARD, FORWARD, held

from . import oracle

pytestmark = pytest.mark.gpu
E4M3, E5M2 = fp8.DTYPES
CASES = {
    "causal": ((1, 2, 2, 70, 70, 64), {"mask": "causal"}),
    "groups": ((2, 4, 2, 65, 130, 128), {"window": (40, 10)}),
    "sink": ((1, 2, 1, 90, 64, 48), {"softmax": "learnable", "softcap": 4.0}),
}


class Recipe:
    """Stored numbers of one scale each; which numbers stands in `made`."""

    def quantise(self, carriers, rows, narrowed):
        self.made = [fp8.quantise(x.float(), E4M3, 16.0) for x in carriers]
        scale = torch.full((1,), 1 / 16, device=self.made[0].device)
        self.scales = {f"descale_{name}": scale for name in "qkv"}
        return Quantised(tuple(self.made), self.scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_fp8_forward_has_the_gradients_of_its_stored_numbers(case, dtype, monkeypatch):
    shape, arguments = CASES[case]
    recipe = Recipe()
    monkeypatch.setattr(in_force, "recipe", recipe)
    sizes = (*shape, shape[-1])
    tensors = [x.requires_grad_() for x in oracle.operands(*sizes, dtype)]
    q = tensors[0]
    learned = {}
    if arguments.get("softmax") == "learnable":
        learned["sink"] = torch.full((shape[1],), 0.5, device=q.device, requires_grad=True)
    out, aux = attngen.attention(*tensors, **arguments, **learned, return_lse=True, backend="cuda")
    assert out.dtype == dtype
    d_o = oracle.randn(*out.shape).to(dtype)
    inputs = (*tensors, *learned.values())
    found = torch.autograd.grad(out, inputs, d_o)
    given = BackwardOperands(d_o=d_o, o=out.detach(), lse=aux.lse.detach(), dtype=torch.float64)
    values = {name: x.detach() for name, x in learned.items()}
    want = fp8_backward(
        given, *recipe.made, accumulate=torch.float64, **arguments, **values, **recipe.scales
    )
    step = torch.finfo(dtype).eps
    for name, got in zip(("dq", "dk", "dv", "dsink"), found, strict=False):
        exact = want.by_name[name]
        error = (got.double() - exact).abs().max()
        assert error <= 4 * step * exact.abs().max(), f"{name}: {error} of {exact.abs().max()}"


def test_fp8_packed_rows_of_no_sequence_change_nothing():
    results = []
    for filling in (0.0, float("nan")):
        tensors = [oracle.randn(150, heads, 64).bfloat16() for heads in (2, 1, 1)]
        ends = torch.tensor([0, 70, 130], dtype=torch.int32, device=tensors[0].device)
        for x in tensors:
            x[130:] = filling
            x.requires_grad_()
        layer = fp8_front.Attention(4, device=ends.device)
        recipe = fp8_front.DelayedScaling(amax_history_len=4)
        with fp8_front.autocast(recipe=recipe):
            out = layer(
                *tensors, layout="thd", mask="causal", cu_seqlens_q=ends, cu_seqlens_kv=ends,
                backend="cuda",
            )  # fmt: skip
        gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        assert all(x.isfinite().all() and not x[130:].any() for x in (out, *gradients))
        results.append((out, *gradients, *layer.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fp8_call_with_a_gradient_takes_the_kernels_when_compiled():
    torch._dynamo.reset()
    tensors = [x.requires_grad_() for x in oracle.operands(1, 2, 2, 64, 64, 64, 64, torch.bfloat16)]

    def attend(q, k, v):
        with fp8_front.autocast():
            return attngen.attention(q, k, v, mask="causal", backend="cuda")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for call in (attend, compiled):
        out = call(*tensors)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


RECIPES = {
    "current": fp8_front.Float8CurrentScaling(),
    "delayed": fp8_front.DelayedScaling(amax_history_len=4),
    "current_in_8": fp8_front.Float8CurrentScaling(backward="fp8"),
    "delayed_in_8": fp8_front.DelayedScaling(
        fp8_format=fp8_front.Format.E4M3, amax_history_len=4, backward="fp8"
    ),
}


WIDE = {"sizes": (1, 70), "heads": (2, 1, 1), "dims": (192, 192, 128)}


@pytest.mark.parametrize(
    ("name", "shape"), [("current_in_8", {}), ("delayed_in_8", {}), ("current_in_8", WIDE)],
    ids=["current", "delayed", "wide"],
)  # fmt: skip
def test_fp8_steps_in_8_bits_are_as_near_as_the_definition(name, shape):
    steps = [training_operands(**shape), training_operands(10, **shape)]
    found = {}
    for backend in ("cuda", "reference"):
        layer = fp8_front.Attention(4, device=steps[0][0].device)
        found[backend] = [
            training_step(layer, RECIPES[name], tensors, backend) for tensors in steps
        ]
        assert layer.scales.gradient_scale[1] > 0
    for number, tensors in enumerate(steps):
        wide = [x.detach().double().requires_grad_() for x in tensors]
        out, _ = reference.attention(*wide, mask="causal")
        exact = (out, *torch.autograd.grad(out.square().sum(), wide))
        for got, defined, want in zip(
            found["cuda"][number], found["reference"][number], exact, strict=True
        ):
            allowed = 1.1 * (defined.double() - want).norm() + 1e-3 * want.norm()
            assert (got.double() - want).norm() <= allowed


def training_step(layer, recipe, tensors, backend="cuda"):
    """The output and the gradients of a step, at whose end delayed scales move."""
    with fp8_front.autocast(recipe=recipe):
        out = layer(*tensors, mask="causal", backend=backend, deterministic=True)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)


def training_operands(seed=0, sizes=(2, 300), heads=(4, 2, 2), dims=(64, 64, 64)):
    return [
        oracle.randn(*sizes, *each, seed=seed + n).requires_grad_()
        for n, each in enumerate(zip(heads, dims, strict=True))
    ]


@pytest.mark.device
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_step_captured_in_a_graph_follows_inputs_and_histories(name):
    tensors = training_operands()
    layer, twin = (fp8_front.Attention(4, device=tensors[0].device) for _ in range(2))
    graph, found = oracle.capture(lambda: training_step(layer, RECIPES[name], tensors))
    for number in range(1, 4):
        with torch.no_grad():
            for held, new in zip(tensors, training_operands(10 * number), strict=True):
                held.copy_(new * number)
        twin.load_state_dict(layer.state_dict())
        graph.replay()
        want = training_step(twin, RECIPES[name], tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        states = layer.state_dict(), twin.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert layer.scales.scale.any() == name.startswith("delayed")
    assert layer.scales.gradient_scale.any() == name.endswith("in_8")


@pytest.mark.device
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_step_never_waits_for_the_device(name):
    tensors = training_operands()
    layer = fp8_front.Attention(4, device=tensors[0].device)
    training_step(layer, RECIPES[name], tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            training_step(layer, RECIPES[name], tensors)
        for known in held(*FORWARD, *BACKWARD):
            known.clear()  # nor when it is checked anew
        training_step(layer, RECIPES[name], tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
