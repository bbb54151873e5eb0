"""FP8 forwards with gradients in 16 bits: what autograd gives is `reference.fp8_backward`'s."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import SpecError, reference
from attngen.call.recipe import IN_16_BITS, GradientForm, Quantised, in_force
from attngen.call.table import CARRIERS, INPUTS
from attngen.frontends.pytorch import eight_bits
from attngen.frontends.pytorch.quantised import widened
from attngen.frontends.pytorch.signature import split
from attngen.reference import BackwardOperands, fp8
from tests.support.caches import FORWARD, forget

E4M3, E5M2 = fp8.DTYPES
STATE = torch.tensor([3, 14])
CU = torch.tensor([0, 5, 5, 12], dtype=torch.int32)


class Halving:
    """A recipe whose stored numbers are twice the operands; keeps what it made."""

    def __init__(self):
        self.made = []

    def quantise(self, carriers, rows, narrowed):
        self.rows = rows
        stored = [None if x is None else fp8.quantise(x.float(), E4M3, 2.0) for x in carriers]
        scales = {f"descale_{name}": torch.tensor([0.5]) for name in CARRIERS}
        if not torch.compiler.is_compiling():
            self.made.append(stored)
        return Quantised(tuple(stored), scales)

    def stored_gradients(self):
        return IN_16_BITS


@pytest.fixture
def recipe(monkeypatch):
    made = Halving()
    monkeypatch.setattr(in_force, "recipe", made)
    return made


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(*shapes, dtype=torch.bfloat16):
    return [randn(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


DENSE = ((2, 12, 4, 16), (2, 12, 2, 16), (2, 12, 2, 32))
PACKED = ((12, 4, 16), (12, 2, 16), (12, 2, 16))
VARIANTS = {
    "plain": (DENSE, {}),
    "causal": (DENSE, {"mask": "causal_bottom_right", "softcap": 3.0}),
    "window": (DENSE, {"window": (3, 0), "alibi_slopes": True}),
    "dropout": (DENSE, {"dropout_p": 0.3, "rng_state": STATE}),
    "sink": (DENSE, {"softmax": "learnable", "sink": randn(4, dtype=torch.float32, seed=7)}),
    "bias": (DENSE, {"bias": randn(1, 4, 12, 12, seed=7), "mask": "causal"}),
    "lengths": (PACKED, {"layout": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}),
    "one_tensor": (((2, 12, 3, 2, 16),), {"layout": "bs3hd", "mask": "causal"}),
    "two_tensors": (((2, 12, 4, 16), (2, 12, 2, 2, 16)), {"layout": "bshd_bs2hd"}),
}


def gradients(shapes, arguments, call=attngen.attention):
    """Output, LSE, and the gradients of the operands and of what is learned."""
    learned = {
        name: arguments[name].clone().requires_grad_()
        for name in ("sink", "bias")
        if name in arguments
    }
    tensors = leaves(*shapes)
    out, aux = call(*tensors, **{**arguments, **learned}, return_lse=True)
    inputs = (*tensors, *learned.values())
    d_o, d_lse = randn(*out.shape, seed=8), randn(*aux.lse.shape, dtype=torch.float32, seed=9)
    return out.detach(), aux.lse.detach(), torch.autograd.grad((out, aux.lse), inputs, (d_o, d_lse))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_stored_numbers(variant, recipe):
    shapes, arguments = VARIANTS[variant]
    out, lse, found = gradients(shapes, arguments)
    (stored,) = recipe.made
    d_o, d_lse = randn(*out.shape, seed=8), randn(*lse.shape, dtype=torch.float32, seed=9)
    scales = {f"descale_{name}": torch.tensor([0.5]) for name in CARRIERS}
    with torch.no_grad():
        q, k, v = stored
        want_out, want_aux = reference.attention(q, k, v, **arguments, **scales)
    given = BackwardOperands(d_o=d_o, o=out, lse=lse, dlse=d_lse)
    want = reference.fp8_backward(given, q, k, v, **arguments, **scales)
    assert torch.equal(out, want_out) and torch.equal(lse, want_aux.lse)
    names = [f"d{name}" for name in (*CARRIERS[: len(shapes)], "sink", "bias")]
    wanted = [want.by_name[name] for name in names if name in want.by_name]
    assert len(wanted) == len(found)
    for got, each in zip(found, wanted, strict=True):
        assert torch.equal(got, each.to(got.dtype)) and got.any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", ["causal", "dropout", "sink", "bias", "lengths", "one_tensor"])
def test_compiled_call_equals_the_eager_one(variant, recipe):
    shapes, arguments = VARIANTS[variant]
    compiled = torch.compile(attngen.attention, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    want, found = gradients(shapes, arguments), gradients(shapes, arguments, compiled)
    for got, each in zip((*found[:2], *found[2]), (*want[:2], *want[2]), strict=True):
        assert torch.equal(got, each)


@pytest.mark.slow
def test_compiled_call_follows_the_recipe_in_force(recipe, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(attngen.attention, fullgraph=True, backend="aot_eager")
    q, k, v = leaves(*DENSE)
    with_recipe = compiled(q, k, v)
    assert torch.equal(with_recipe, attngen.attention(q, k, v))
    monkeypatch.setattr(in_force, "recipe", None)
    without = compiled(q, k, v)
    assert torch.equal(without, attngen.attention(q, k, v)) and not torch.equal(
        without, with_recipe
    )


def test_what_is_saved_has_8_bits(recipe):
    q, k, v = leaves(*DENSE)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = attngen.attention(q, k, v)
    big = [x for x in saved if x.numel() >= k.numel()]
    assert sorted(str(x.dtype) for x in big) == ["torch.bfloat16", *["torch.float8_e4m3fn"] * 3]
    assert [x.shape for x in big if x.dtype == out.dtype] == [out.shape], "the output alone"


def test_checkpointed_call_has_the_same_gradients(recipe):
    found = []
    for around in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        tensors = leaves(*DENSE)
        out = around(lambda *x: attngen.attention(*x, mask="causal"), *tensors)
        found.append(torch.autograd.grad(out, tensors, randn(*out.shape, seed=8)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_recipe_under_autocast_takes_its_dtype(recipe):
    q, k, v = leaves(*DENSE, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attngen.attention(q, k, v)
    assert out.dtype == torch.bfloat16 and recipe.made
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.any()


def test_recipe_without_gradients_is_a_plain_fp8_call(recipe):
    q, k, v = (x.detach() for x in leaves(*DENSE, dtype=torch.float16))
    out, aux = attngen.attention(q, k, v, return_amax=True)
    (stored,) = recipe.made
    scales = {f"descale_{name}": torch.tensor([0.5]) for name in CARRIERS}
    want, _ = reference.attention(*stored, out_dtype=torch.float16, **scales)
    assert torch.equal(out, want) and out.dtype == torch.float16 and aux.amax_o > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, E4M3])
def test_recipe_leaves_calls_of_other_dtypes(recipe, dtype):
    q, k, v = (x.detach().to(dtype) for x in leaves(*DENSE))
    attngen.attention(q, k, v)
    assert not recipe.made


def test_recipe_serves_nested_tensors_as_their_tokens(recipe):
    parts = [randn(n, 2, 16, seed=n) for n in (5, 7)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
    out = attngen.attention(nested, nested, nested, layout="thd")
    ((q, _, _),) = recipe.made
    assert out.is_nested and q.shape == (12, 2, 16)
    out.values().sum().backward()
    assert nested.grad.values().any()


def test_recipe_refuses_functions(recipe):
    q, k, v = leaves(*DENSE)
    with pytest.raises(SpecError, match="mask_mod: FP8 recipes take no functions"):
        attngen.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j)


def test_transforms_have_what_autograd_has(recipe):
    q, k, v = (x.detach() for x in leaves(*DENSE))

    def loss(q, k, v):
        return attngen.attention(q, k, v, mask="causal").float().square().sum()

    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(loss(*tensors), tensors)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    samples = torch.vmap(torch.func.grad(loss))(q[:, None], k[:, None], v[:, None])
    assert torch.equal(samples[:, 0], want[0])


def test_derivatives_that_there_are_not_are_refused(recipe):
    tensors = leaves(*DENSE)
    loss = attngen.attention(*tensors).float().square().sum()
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    with pytest.raises(SpecError, match="no second derivative"):
        torch.autograd.grad(first[0].float().sum(), tensors)
    q, k, v = (x.detach() for x in tensors)
    with forward_ad.dual_level(), pytest.raises(SpecError, match="forward-mode"):
        attngen.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(SpecError, match="forward-mode"):
        torch.func.jvp(lambda q: attngen.attention(q, k, v), (q,), (torch.ones_like(q),))


def test_exported_call_holds_the_recipe(recipe):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attngen.attention(q, k, v, mask="causal")

    tensors = [x.detach() for x in leaves(*DENSE)]
    program = torch.export.export(Model(), tuple(tensors))
    assert torch.equal(program.module()(*tensors), attngen.attention(*tensors, mask="causal"))


def test_fp8_leaf_has_a_16_bit_gradient_where_it_says_so():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.10")
    q, k, v = (x.detach().to(E5M2) for x in leaves(*DENSE))
    q.requires_grad_().grad_dtype = torch.bfloat16
    out = attngen.attention(q, k, v, mask="causal")
    d_o = randn(*out.shape, seed=8)
    out.backward(d_o)
    plain = q.detach()
    _, aux = reference.attention(plain, k, v, mask="causal")
    given = BackwardOperands(d_o=d_o, o=out.detach(), lse=aux.lse)
    want = reference.fp8_backward(given, plain, k, v, mask="causal")
    assert q.grad.dtype == torch.bfloat16 and torch.equal(q.grad, want.dq)


def test_sink_beside_fp8_operands_has_its_gradient():
    q, k, v = (x.detach().to(E4M3) for x in leaves(*DENSE))
    sink = torch.zeros(4, requires_grad=True)
    attngen.attention(q, k, v, softmax="learnable", sink=sink).sum().backward()
    assert sink.grad.abs().min() > 0


def test_gradients_that_there_are_not_are_refused_together():
    q, k, v = (x.detach().to(E4M3).requires_grad_() for x in leaves(*DENSE))
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(SpecError) as caught:
        attngen.attention(q, k, v, out_dtype=E4M3, softmax_scale=scale)
    words = ["16 bits alone", "q requires", "k requires", "v requires", "softmax_scale requires"]
    assert len(caught.value.reasons) == 5
    assert all(any(word in reason for reason in caught.value.reasons) for word in words)
    with pytest.raises(SpecError, match="descale_q has no gradient"):
        attngen.attention(
            *(x.detach() for x in (q, k, v)),
            descale_q=torch.ones(1, requires_grad=True),
            softmax="learnable",
            sink=torch.zeros(4, requires_grad=True),
        )


def test_scales_that_are_wrong_are_refused_with_all_reasons():
    q, k, v = (x.detach().to(E4M3) for x in leaves(*DENSE))
    sink = torch.zeros(4, requires_grad=True)
    wrong = {"descale_q": torch.ones(3), "descale_k": torch.ones(1).int(), "scale_s": torch.ones(1)}
    with pytest.raises(SpecError) as caught:
        attngen.attention(q, k, v, softmax="learnable", sink=sink, **wrong)
    assert len(caught.value.reasons) == 3


def test_calls_alike_are_checked_once_and_hold_no_tensor(recipe, monkeypatch):
    forget(monkeypatch, *FORWARD)
    checked, real = [], eight_bits.routing.use_kernels

    def use_kernels(call):
        checked.append(call.mask)
        return real(call)

    monkeypatch.setattr(eight_bits.routing, "use_kernels", use_kernels)

    def attend(shapes=DENSE, **arguments):
        tensors = leaves(*shapes)
        out = attngen.attention(*tensors, **arguments, backend="reference")
        return torch.autograd.grad(out.float().square().sum(), tensors)

    first = attend(mask="causal", softmax="learnable", sink=torch.zeros(4))
    del recipe.made[:-1]
    held = [weakref.ref(x) for x in recipe.made.pop()]
    again = attend(mask="causal", softmax="learnable", sink=torch.zeros(4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert checked == ["causal"] and not any(each() for each in held)
    attend(mask="none")
    attend(mask="none", sink=torch.zeros(4, requires_grad=True), softmax="learnable")
    attend(((1, 8, 2, 16),) * 3, mask="none")
    assert checked == ["causal", "none", "none", "none"]


@pytest.mark.parametrize("watched", [False, True])
def test_calls_that_nobody_looks_on_at_pass_torchs_way_through_python(watched, recipe, monkeypatch):
    """It looks at a schema once for each argument, a millisecond and more of a call."""
    taken = []
    real = torch._library.utils.fill_defaults
    monkeypatch.setattr(
        torch._library.utils, "fill_defaults", lambda *given: taken.append(0) or real(*given)
    )
    tensors = leaves(*DENSE)
    with _Watching() if watched else nullcontext():
        out = attngen.attention(*tensors, backend="reference")
    torch.autograd.grad(out.float().sum(), tensors)
    assert bool(taken) is watched


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_kernels_that_refuse_a_launch_leave_it_to_the_reference(recipe, monkeypatch, caplog):
    forget(monkeypatch, *FORWARD)
    monkeypatch.setattr(eight_bits.routing, "use_kernels", lambda call: True)

    def refused(*_):
        raise SpecError("an address, in this test")

    monkeypatch.setattr(eight_bits.QuantisedCall, "of", refused)
    tensors = leaves(*DENSE)
    out = attngen.attention(*tensors)
    assert torch.equal(out, attngen.attention(*tensors)) and "in this test" in caplog.text
    with pytest.raises(SpecError, match="in this test"):
        attngen.attention(*tensors, backend="cuda")


@pytest.mark.parametrize("layout", ["bs3hd", "bshd_bs2hd", "bhsd"])
def test_widened_operands_are_what_the_stored_ones_stand_for(layout):
    shapes = {
        "bs3hd": [(2, 5, 3, 2, 16)],
        "bshd_bs2hd": [(2, 5, 4, 16), (2, 5, 2, 2, 16)],
        "bhsd": [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)],
    }[layout]
    q, k, v = (*[x.detach().to(E4M3) for x in leaves(*shapes)], None, None)[:3]
    descales = [torch.tensor([[0.5, 2.0], [4.0, 0.25]]), torch.tensor([8.0]), None]
    tensors, arguments = split((*descales, *[None] * (len(INPUTS) - 6), layout))
    found = dict(zip(INPUTS, widened([q, k, v, *tensors], arguments, torch.float16), strict=True))
    assert found["descale_q"] is None and found["q"].dtype == torch.float16
    scales = {"descale_q": descales[0], "descale_k": descales[1]}
    lse = reference.attention(q, k, v, layout=layout, **scales)[1].lse
    wide = [found[name] for name in CARRIERS]
    assert torch.equal(lse, reference.attention(*wide, layout=layout)[1].lse)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", [GradientForm(), GradientForm("float8_e5m2")], ids=["16", "8"])
def test_forward_operation_passes_opcheck(form):
    q, k, v = (x.detach().to(E4M3) for x in leaves(*DENSE))
    q16 = leaves(*DENSE)[0]
    torch.library.opcheck(
        torch.ops.attngen.quantised,
        (False, *form, None, None, q16, None, None, q, k, v),
        {"mask": "causal", "out_dtype": "bfloat16"},
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    "wanted", [(True,) * 4, (True, False, False, True), (False, True, True, False)]
)
@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16"])
def test_backward_operation_returns_what_its_fake_says(wanted, dtype):
    q, k, v = (x.detach().to(E4M3) for x in leaves(*DENSE))
    learned = {"sink": torch.zeros(4), "bias": randn(1, 4, 12, 12, seed=7)}
    out, aux = reference.attention(q, k, v, softmax="learnable", **learned)
    given = (torch.ones_like(out), None, out, aux.lse, *[None] * 7, q, k, v)
    more = {"softmax": "learnable", "out_dtype": dtype, **learned}
    more |= dict(zip(("want_dq", "want_dkv", "want_dsink", "want_dbias"), wanted, strict=True))
    found = torch.ops.attngen.reference_fp8_backward(*given, **more)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given]
        more = {
            n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in more.items()
        }
        expected = torch.ops.attngen.reference_fp8_backward(*fakes, **more)
    for got, fake in zip(found, expected, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (fake.shape, fake.stride(), fake.dtype)
    dq, dk, dv, dsink, dbias, *others = found
    sizes = [x.numel() > 0 for x in (dq, dk, dsink, dbias)]
    assert sizes == [*wanted] and (dv.numel() > 0) == wanted[1] and len(others) >= 4
