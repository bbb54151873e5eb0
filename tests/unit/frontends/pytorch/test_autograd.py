"""Gradients through `attngen.attention`: whatever autograd does to a call, the operations are asked
for the right thing. The reference computes them here."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import SpecError
from attngen.call.table import WantedGradients
from attngen.frontends.pytorch import checked_call

CALL = {"mask": "causal_bottom_right", "window": (3, -1), "softmax_scale": 0.3}
SUBSETS = [
    (wanted, parts)
    for parts in (("out",), ("lse",), ("out", "lse"))
    for wanted in itertools.product((True, False), repeat=3)
    if any(wanted[: 2 if parts == ("lse",) else 3])  # the LSE does not depend on v
]


def operands(wanted=(True, True, True), seed=0, dtype=torch.bfloat16, d=16, d_v=24):
    """Leaves q, k and v of odd lengths, two query heads a key/value head."""
    make = torch.Generator().manual_seed(seed)
    shapes = (2, 5, 4, d), (2, 7, 2, d), (2, 7, 2, d_v)
    return [
        torch.randn(shape, generator=make).to(dtype).requires_grad_(want)
        for shape, want in zip(shapes, wanted, strict=True)
    ]


def attend(q, k, v, backend="cuda", **arguments):
    """One call; a number that depends on the output alone where no LSE is asked for."""
    return attngen.attention(q, k, v, **{**CALL, **arguments}, backend=backend)


def step(q, k, v, parts=("out", "lse"), **arguments):
    """A loss of the output, the LSE, or both."""
    out, aux = attend(q, k, v, return_lse=True, **arguments)
    terms = {"out": out.float().sin().sum(), "lse": aux.lse.cos().sum()}
    return sum(terms[part] for part in parts)


def gradients(tensors, function=step, **arguments):
    """Gradients of the leaves that require one."""
    leaves = [x for x in tensors if x.requires_grad]
    return torch.autograd.grad(function(*tensors, **arguments), leaves, materialize_grads=True)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("wanted", "parts"), SUBSETS, ids=str)
def test_gradients_of_any_inputs_from_any_results_are_the_references(kernels, wanted, parts):
    tensors = operands(wanted)
    found = gradients(tensors, parts=parts)
    assert kernels.names == ["forward", "backward"]
    _, arguments, asked, from_lse = kernels.calls[-1]
    assert arguments.mask == CALL["mask"] and arguments.window_left == 3
    assert asked == WantedGradients(wanted[0], wanted[1] or wanted[2], False, False, False)
    assert from_lse == ("lse" in parts)
    assert_same(found, gradients(tensors, parts=parts, backend="reference"))


@pytest.mark.parametrize("layout", ["sbhd", "bhsd"])
def test_gradients_have_the_axis_order_of_the_layout(kernels, layout):
    order = ["bshd".index(axis) for axis in layout]
    tensors = [x.detach().permute(order).clone().requires_grad_() for x in operands()]
    found = gradients(tensors, layout=layout)
    assert_same(found, gradients(tensors, layout=layout, backend="reference"))


def test_gradients_flow_through_views_of_one_packed_tensor(kernels):
    packed = torch.randn(2, 5, 3, 4, 16).bfloat16().requires_grad_()

    def function(packed, backend):
        return step(*packed.unbind(2), backend=backend)

    assert_same(*(gradients([packed], function, backend=b) for b in ("cuda", "reference")))


@pytest.mark.parametrize("sizes", [(0, 7), (5, 0)], ids=str)
def test_gradients_of_empty_lengths_are_zero_or_empty(kernels, sizes):
    tensors = [torch.randn(2, n, 2, 16).bfloat16().requires_grad_() for n in (*sizes, sizes[1])]
    for x, gradient in zip(tensors, gradients(tensors, parts=("out",)), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_runs_the_forward_twice_and_changes_no_gradient(kernels, reentrant):
    tensors = operands()
    loss = checkpoint(step, *tensors, use_reentrant=reentrant)
    found = torch.autograd.grad(loss, tensors) if not reentrant else backward(loss, tensors)
    assert kernels.names == ["forward", "forward", "backward"]
    assert_same(found, gradients(tensors))


def backward(loss, tensors):
    """`.grad` of each, which a reentrant checkpoint insists on."""
    loss.backward()
    return [x.grad for x in tensors]


def test_tensors_saved_on_the_cpu_change_no_gradient(kernels):
    tensors = operands()
    with torch.autograd.graph.save_on_cpu():
        found = gradients(tensors)
    assert_same(found, gradients(tensors))


def test_saved_tensors_are_those_of_the_operands_and_results_alone(kernels):
    tensors, shapes = operands(), []
    note = lambda x: shapes.append(x.shape) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attend(*tensors)
    assert sorted(shapes) == sorted([*(x.shape for x in tensors), (2, 5, 4, 24), (2, 4, 5)])


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_step_compiles_whole(kernels, dynamic, wanted):
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seed in range(2):
        tensors = operands(wanted, seed)
        torch.testing.assert_close(gradients(tensors, compiled), gradients(tensors))
    asked = {call[2] for call in kernels.calls if call[0] == "backward"}
    assert asked == {WantedGradients(True, wanted[1], False, False, False)}


def test_autocast_casts_operands_and_leaves_gradients_in_float32(kernels):
    tensors = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, loss = attend(*tensors), step(*tensors)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(loss, tensors)
    halves = [x.detach().bfloat16().requires_grad_() for x in tensors]
    assert_same(found, [x.float() for x in gradients(halves)])


def test_autocast_does_not_make_the_reference_less_exact():
    tensors = operands()
    with torch.autocast("cpu", torch.bfloat16):
        loss = step(*tensors, backend="reference")
    assert_same(torch.autograd.grad(loss, tensors), gradients(tensors, backend="reference"))


def test_autocast_that_is_off_casts_nothing(kernels):
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        with pytest.raises(SpecError, match="fp32"):
            attend(*operands(dtype=torch.float32))


def test_device_that_knows_no_autocast_is_served(kernels):
    out = attend(*(x.detach().to("meta") for x in operands()), backend="reference")
    assert out.shape == (2, 5, 4, 24)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_deterministic_is_what_the_call_says_and_else_what_torch_does(kernels, asked, everywhere):
    torch.use_deterministic_algorithms(everywhere)
    try:
        loss = step(*(tensors := operands()), deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.autograd.grad(loss, tensors)  # where the switch no longer matters
    expected = everywhere if asked is None else asked
    assert [call[1].deterministic for call in kernels.calls] == [expected] * 2


def test_fp8_leaf_whose_gradient_would_have_8_bits_is_refused(kernels):
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in operands(d=16, d_v=32))
    with pytest.raises(SpecError, match="q requires a gradient.*grad_dtype"):
        attend(q.requires_grad_(), k, v)
    assert not kernels.calls


def test_fp8_result_whose_gradient_would_have_8_bits_is_refused(kernels):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in operands(d=16))
    with pytest.raises(SpecError, match="q requires a gradient.*if it is a leaf; else"):
        attend(q, k, v)
    assert not kernels.calls


def test_fp8_leaf_that_does_not_say_so_is_refused_after_one_that_does():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.10")
    tensors = [x.detach().to(torch.float8_e4m3fn).requires_grad_() for x in operands(d=16)]
    for x in tensors:
        x.grad_dtype = torch.bfloat16
    attngen.attention(*tensors)
    q, k, v = tensors
    with pytest.raises(SpecError, match="v requires a gradient.*grad_dtype"):
        attngen.attention(q, k, v.detach().requires_grad_())


def test_no_grad_runs_without_a_graph_and_alternates_with_calls_that_have_one(kernels):
    tensors = operands()
    for _ in range(3):  # the first settles the call for both
        with torch.no_grad():
            plain = attend(*tensors)
        assert not plain.requires_grad and not attend(*(x.detach() for x in tensors)).requires_grad
        out = attend(*tensors)
        assert out.requires_grad and torch.equal(out, plain)
        assert_same(gradients(tensors), gradients(tensors, backend="reference"))


def test_retained_graph_gives_its_gradients_twice(kernels):
    tensors = operands()
    loss = step(*tensors)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert_same(torch.autograd.grad(loss, tensors), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


def test_operand_changed_after_the_call_is_noticed(kernels):
    tensors = operands()
    held = tensors[0] * 1
    loss = step(held, *tensors[1:])
    held.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(loss, tensors)


def test_second_derivative_is_refused(kernels):
    tensors = operands()
    first = torch.autograd.grad(step(*tensors), tensors, create_graph=True)
    with pytest.raises(SpecError, match="no second derivative"):
        first[0].sum().backward()


def test_forward_mode_derivative_is_refused(kernels):
    q, k, v = (x.detach() for x in operands())
    with forward_ad.dual_level():
        attend(q, k, v)
        with pytest.raises(SpecError, match="forward-mode"):
            attend(q, forward_ad.make_dual(k, torch.ones_like(k)), v)
    with pytest.raises(SpecError, match="forward-mode"):
        torch.func.jvp(lambda q: attend(q, k, v), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize(
    "wanted", [WantedGradients(), WantedGradients(dq=False), WantedGradients(dkv=False)], ids=str
)
def test_backward_op_passes_opcheck(kernels, wanted):
    q, k, v = (x.detach() for x in operands())
    out, aux = attend(q, k, v, return_lse=True)
    torch.library.opcheck(
        torch.ops.attngen.backward,
        (out.sin(), aux.lse.cos(), q, k, v, out, aux.lse),
        {"mask": "causal", "want_dq": wanted.dq, "want_dkv": wanted.dkv},
    )


def test_forward_op_passes_opcheck_with_gradients(kernels):
    torch.library.opcheck(torch.ops.attngen.forward, tuple(operands()), {"mask": "causal"})


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_number_in_a_tensor_is_read_in_each_call(kernels, monkeypatch, name):
    seen = []
    monkeypatch.setattr(checked_call.CheckedCall, "launch", lambda self, _: seen.append(self))
    number = torch.tensor(0.5)
    for value in (0.5, 0.25):
        number.fill_(value)
        attngen.attention(*operands(), **{name: number}, backend="cuda")
    assert [getattr(each.arguments, name) for each in seen] == [0.5, 0.25]


def test_default_slopes_of_an_inference_serve_training_too(kernels, monkeypatch):
    monkeypatch.setattr(checked_call, "unobserved", lambda tensors: len(tensors) == 1)  # for slopes
    monkeypatch.setattr(checked_call, "_slopes", {})
    q, k, v = operands()
    with torch.inference_mode():
        attngen.attention(q.detach(), k.detach(), v.detach(), alibi_slopes=True, backend="cuda")
    attngen.attention(q, k, v, alibi_slopes=True, backend="cuda").float().sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("layout", ["bs3hd", "bsh3d", "sb3hd"])
def test_default_slopes_of_a_packed_tensor_are_one_for_each_head(kernels, layout):
    packed = torch.randn(2, 5, *((4, 3) if layout == "bsh3d" else (3, 4)), 16).bfloat16()
    found, expected = (
        attngen.attention(packed, layout=layout, alibi_slopes=True, backend=backend)
        for backend in ("cuda", "reference")
    )
    assert torch.equal(found, expected) and kernels.names == ["forward"]


def test_op_called_with_its_operands_alone_has_gradients(kernels):
    """No argument stands behind them for the dispatcher to keep."""
    q, k, v = operands()
    out, *_ = torch.ops.attngen.forward(q, k, v)
    found = torch.autograd.grad(out.float().square().sum(), [q, k, v])
    wanted = attngen.attention(q, k, v, backend="reference")
    expected = torch.autograd.grad(wanted.float().square().sum(), [q, k, v])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("module", ["attention", "forward"])
def test_module_that_runs_the_forward_brings_its_gradient_along(module):
    code = (
        f"import torch, attngen.frontends.pytorch.{module};"
        "assert hasattr(torch.ops.attngen, 'backward'), "
        "'a call would have no gradient'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("trained", [True, False])
def test_gradient_of_a_sink_is_the_references(kernels, trained):
    q, k, v = operands((trained,) * 3)
    heads = q.shape[2]
    sink = torch.linspace(-1, 2, heads).requires_grad_()
    arguments = {"mask": "causal", "softmax": "learnable", "sink": sink, "softcap": 2.0}
    arguments["alibi_slopes"] = True
    found = []
    for backend in ("cuda", "reference"):
        out = attngen.attention(q, k, v, **arguments, backend=backend)
        inputs = [q, k, v, sink] if trained else [sink]
        found.append(torch.autograd.grad(out.float().square().sum(), inputs))
    (*_, (name, _, wanted, _)) = kernels.calls
    assert name == "backward" and wanted == WantedGradients(trained, trained, True, False, False)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["post_scale", "pre_scale"])
@pytest.mark.parametrize("trained", [True, False])
def test_gradient_of_a_bias_is_the_references(kernels, trained, kind, shape):
    q, k, v = operands((trained,) * 3)
    batch, s_q, heads, _ = q.shape
    sizes = [n if part > 1 else 1 for n, part in zip((batch, heads), shape, strict=True)]
    bias = torch.randn(*sizes, s_q, k.shape[1], dtype=q.dtype).requires_grad_()
    found = []
    for backend in ("cuda", "reference"):
        out = attngen.attention(q, k, v, mask="causal", bias=bias, bias_type=kind, backend=backend)
        inputs = [q, k, v, bias] if trained else [bias]
        found.append(torch.autograd.grad(out.float().square().sum(), inputs))
    (*_, (name, arguments, wanted, _)) = kernels.calls
    assert name == "backward" and wanted == WantedGradients(trained, trained, False, True, False)
    assert arguments.bias_type == kind
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_gradient_of_slopes_is_refused_before_anything_is_computed(kernels):
    q, k, v = operands()
    slopes = torch.ones(q.shape[2], requires_grad=True)
    with pytest.raises(SpecError, match="alibi_slopes has no gradient"):
        attngen.attention(q, k, v, alibi_slopes=slopes, backend="cuda")
    with torch.no_grad():
        attngen.attention(q, k, v, alibi_slopes=slopes, backend="cuda")
