"""Calls under `torch.func`'s transforms: which operations are asked, and for what. The reference
computes them here, and, differentiated by autograd, says what they should find."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import attngen
from attngen import SpecError

SAMPLES = 3


def operands(batch=2, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (batch, 5, 4, 16), (batch, 7, 2, 16), (batch, 7, 2, 24)
    return [torch.randn(shape, generator=make).bfloat16() for shape in shapes]


def attend(q, k, v, **arguments):
    return attngen.attention(q, k, v, **{"mask": "causal", "backend": "cuda", **arguments})


def loss(q, k, v, **arguments):
    """A number that depends on the output and the LSE."""
    out, aux = attend(q, k, v, return_lse=True, **arguments)
    return out.float().sin().sum() + aux.lse.clamp(min=-9).cos().sum()


def expected(tensors, **arguments):
    """Gradients of `loss`, by the reference and autograd."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*leaves, backend="reference", **arguments), leaves)


def assert_same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_grad_asks_each_operation_once(kernels):
    tensors = operands()
    assert_same(grad(loss, argnums=(0, 1, 2))(*tensors), expected(tensors))
    assert kernels.names == ["forward", "backward"]


def test_backward_is_asked_for_what_is_differentiated_alone(kernels):
    tensors = operands()
    assert torch.equal(grad(loss)(*tensors), expected(tensors)[0])
    wanted, from_lse = kernels.calls[-1][2:]
    assert wanted == (True, False, False, False, False) and from_lse


def test_vjp_of_the_lse_alone_is_that_of_autograd(kernels):
    q, k, v = operands()

    def lse(q, backend="cuda"):
        return attend(q, k, v, backend=backend, return_lse=True)[1].lse

    found, pull = vjp(lse, q)
    leaf = q.clone().requires_grad_()
    result = lse(leaf, "reference")
    assert torch.equal(found, result)
    cotangent = torch.randn(found.shape)
    assert_same(pull(cotangent), torch.autograd.grad(result, leaf, cotangent))


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, -2, 3), (2, None, 0), (None, None, -1)], ids=str)
@pytest.mark.parametrize("chunk", [None, 2])
def test_vmap_over_any_axes_is_one_call_for_each_sample(kernels, dims, chunk):
    samples = [operands(seed=n) for n in range(SAMPLES)]
    given = [
        samples[0][n] if dim is None else torch.stack([each[n] for each in samples], dim)
        for n, dim in enumerate(dims)
    ]
    found = vmap(attend, in_dims=dims, out_dims=1, chunk_size=chunk)(*given)
    assert kernels.names == ["forward"] * SAMPLES
    for n, each in enumerate(samples):
        one = [(samples[0] if dim is None else each)[place] for place, dim in enumerate(dims)]
        assert torch.equal(found[:, n], attend(*one, backend="reference"))


def test_vmap_of_what_it_does_not_map_over_is_one_call(kernels):
    q, k, v = operands()
    found = vmap(lambda x: attend(q, k, v) * x)(torch.tensor([1.0, 2.0]).bfloat16())
    assert torch.equal(found[1], 2 * found[0]) and kernels.names == ["forward"]


def test_vmap_in_vmap_is_one_call_for_each_pair(kernels):
    q, k, v = (torch.stack([x, -x]) for x in operands())
    found = vmap(lambda q: vmap(lambda k, v: attend(q, k, v))(k, v))(q)
    assert kernels.names == ["forward"] * 4
    for i, j in ((0, 1), (1, 0)):
        assert torch.equal(found[i, j], attend(q[i], k[j], v[j], backend="reference"))


def per_sample(q, k, v, **arguments):
    return loss(q[None], k[None], v[None], **arguments)


def test_gradients_for_each_sample_are_those_of_each(kernels):
    tensors = operands(SAMPLES)
    found = vmap(grad(per_sample, argnums=(0, 1, 2)))(*tensors)
    assert kernels.names == ["forward"] * SAMPLES + ["backward"] * SAMPLES
    for n in range(SAMPLES):
        assert_same([x[n : n + 1] for x in found], expected([x[n : n + 1] for x in tensors]))


def test_gradient_of_vmap_sums_those_of_what_samples_share(kernels):
    q, k, v = operands(SAMPLES)

    def total(k, backend):
        return vmap(lambda q: per_sample(q, k, v[0], backend=backend))(q).sum()

    found = grad(total)(k[0], "cuda")
    each = [expected([q[n : n + 1], k[:1], v[:1]])[1][0] for n in range(SAMPLES)]
    torch.testing.assert_close(found, torch.stack(each).sum(0), rtol=2e-2, atol=2e-2)


def test_tensors_given_by_name_are_mapped_over_and_differentiated(kernels):
    tensors = operands()
    bias = torch.randn(SAMPLES, 4, 5, 7).bfloat16()
    sink, slopes = torch.randn(SAMPLES, 4), torch.rand(SAMPLES, 4)

    def call(bias, sink, slopes, backend="cuda"):
        named = {"bias": bias, "sink": sink, "alibi_slopes": slopes, "softmax": "learnable"}
        return loss(*tensors, **named, backend=backend)

    found = vmap(grad(call, argnums=(0, 1)))(bias, sink, slopes)
    for n in range(SAMPLES):
        leaves = [x[n].clone().requires_grad_() for x in (bias, sink)]
        wanted = torch.autograd.grad(call(*leaves, slopes[n], "reference"), leaves)
        assert_same([x[n] for x in found], wanted)


def test_vmap_maps_the_lse_over(kernels):
    q, k, v = (torch.stack([x, -x]) for x in operands())
    call = {"return_lse": True}
    out, lse = vmap(lambda *one: (lambda out, aux: (out, aux.lse))(*attend(*one, **call)))(q, k, v)
    wanted = attend(q[1], k[1], v[1], backend="reference", **call)
    assert torch.equal(out[1], wanted[0]) and torch.equal(lse[1], wanted[1].lse)


def test_jacobian_by_rows_is_that_of_the_reference(kernels):
    q, k, v = operands()

    def row(scale, backend):
        return attend(q * scale, k, v, backend=backend)[0, 1:4, 0, 0]

    one = torch.ones((), dtype=q.dtype)
    found, wanted = (jacrev(partial(row, backend=name))(one) for name in ("cuda", "reference"))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert kernels.names == ["forward", *["backward"] * 3]


def test_vmap_warns_of_nothing(kernels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(grad(per_sample))(*operands())


def test_vmap_over_nothing_is_refused(kernels):
    q, k, v = operands(0)
    with pytest.raises(SpecError, match="one sample or more"):
        vmap(per_sample)(q, k, v)


def one_leaf(function):
    """By a number that q is scaled by, since forward-mode derivatives of it are few."""
    q, k, v = operands()
    return lambda scale: function(q * scale, k, v)


ONE = torch.ones((), dtype=torch.bfloat16)
FORWARD_MODE = {
    "jvp": lambda f: jvp(f, (ONE,), (ONE,)),
    "jacfwd": lambda f: jacfwd(f)(ONE),
    "linearize": lambda f: linearize(f, ONE),
    "hessian": lambda f: hessian(f)(ONE),
    "jvp of grad": lambda f: jvp(grad(f), (ONE,), (ONE,)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (ONE,))[1])(ONE),
    "jvp of vmap": lambda f: jvp(vmap(f), (ONE[None],), (ONE[None],)),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x,)))(ONE[None]),
    "jvp of functionalize": lambda f: jvp(functionalize(f), (ONE,), (ONE,)),
    "jvp of a cotangent": lambda f: jvp(vjp(f, ONE)[1], (ONE.float(),), (ONE.float(),)),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_derivative_is_refused(kernels, name):
    with pytest.raises(SpecError, match="no forward-mode"):
        FORWARD_MODE[name](one_leaf(loss))


@pytest.mark.parametrize("transform", [vmap, functionalize])
def test_tangent_from_outside_a_transform_is_refused(kernels, transform):
    with forward_ad.dual_level(), pytest.raises(SpecError, match="no forward-mode"):
        transform(one_leaf(loss))(forward_ad.make_dual(ONE[None], ONE[None]))


def test_tangent_of_an_incoming_gradient_is_refused(kernels):
    q, k, v = operands()
    q.requires_grad_()
    out = attend(q, k, v)
    with forward_ad.dual_level(), pytest.raises(SpecError, match="no forward-mode"):
        torch.autograd.grad(out, q, forward_ad.make_dual(out.detach(), out.detach()))


@pytest.mark.slow
def test_tangent_given_to_compiled_code_is_refused(kernels):
    q, k, v = operands()
    compiled = torch.compile(attend, backend="aot_eager")
    compiled(q, k, v)
    with forward_ad.dual_level(), pytest.raises(SpecError, match="no forward-mode"):
        compiled(forward_ad.make_dual(q, q), k, v)


def test_forward_mode_derivative_of_something_else_is_computed(kernels):
    tensors = [x[None] for x in operands()]
    out, tangent = jvp(lambda x: vmap(attend)(*tensors) * x, (ONE,), (ONE,))
    assert torch.equal(out, tangent) and torch.equal(out[0], attend(*operands()))


SECOND = {
    "grad": lambda f: grad(grad(f))(ONE),
    "vmap of grad": lambda f: vmap(grad(grad(f)))(ONE[None]),
    "grad of vmap": lambda f: grad(lambda x: vmap(grad(f))(x)[0])(ONE[None]),
    "of a cotangent": lambda f: grad(lambda x: vjp(f, ONE)[1](x)[0])(ONE.float()),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivative_is_refused(kernels, name):
    with pytest.raises(SpecError, match="no second derivative"):
        SECOND[name](one_leaf(loss))


def test_gradient_of_an_operand_that_has_none_is_refused(kernels):
    q, k, v = operands()
    with pytest.raises(SpecError, match="alibi_slopes has no gradient"):
        grad(lambda slopes: loss(q, k, v, alibi_slopes=slopes))(torch.ones(4))


def test_functionalize_finds_the_operation(kernels):
    tensors = operands()
    assert torch.equal(functionalize(attend)(*tensors), attend(*tensors, backend="reference"))


def test_compiled_vmap_is_that_of_each(kernels):
    q, k, v = (torch.stack([x, -x]) for x in operands())
    found = torch.compile(vmap(attend), backend="aot_eager", fullgraph=True)(q, k, v)
    for n in range(2):
        assert torch.equal(found[n], attend(q[n], k[n], v[n], backend="reference"))
