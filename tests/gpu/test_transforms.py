"""Calls under torch.func's transforms."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import forward_ad

import attngen
from attngen import SpecError

from . import oracle

pytestmark = pytest.mark.gpu


def operands(batch=2):
    return [oracle.randn(batch, 70, heads, 64, seed=n) for n, heads in enumerate((4, 2, 2))]


def weighted(q, k, v, **arguments):
    """A number that depends on every output, and on the LSE."""
    given = {"mask": "causal", "backend": "cuda", **arguments}
    out, aux = attngen.attention(q, k, v, **given, return_lse=True)
    weights = torch.linspace(-1, 1, out.shape[-1], device=q.device)
    return (out.float() * weights).sum() + aux.lse.clamp(min=0).sum()


def gradients_of(tensors, **arguments):
    leaves = [x.clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(weighted(*leaves, **arguments), leaves)


@pytest.mark.parametrize("arguments", [{}, {"window": (20, 0), "deterministic": True}], ids=str)
def test_func_grad_is_that_of_autograd(arguments):
    tensors = operands()
    call = functools.partial(weighted, **arguments)
    found, value = torch.func.grad_and_value(call, argnums=(0, 1, 2))(*tensors)
    torch.testing.assert_close(value, weighted(*tensors, **arguments))
    for one, other in zip(found, gradients_of(tensors, **arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_func_grad_of_a_bias_and_a_sink_is_that_of_autograd():
    tensors = operands()
    bias = oracle.randn(1, 4, 70, 72, seed=5)[..., :70]
    sink = torch.linspace(-2.0, 2.0, 4, device=tensors[0].device)

    def call(bias, sink):
        return weighted(*tensors, bias=bias, softmax="learnable", sink=sink)

    found = torch.func.grad(call, argnums=(0, 1))(bias, sink)
    leaves = [x.clone().requires_grad_() for x in (bias, sink)]
    expected = torch.autograd.grad(call(*leaves), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_func_vjp_is_that_of_autograd():
    tensors = operands()
    call = functools.partial(attngen.attention, mask="causal", backend="cuda")
    out, pull = torch.func.vjp(call, *tensors)
    cotangent = oracle.randn(*out.shape, seed=9)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(call(*leaves), leaves, cotangent)
    assert torch.equal(out, call(*tensors))
    for one, other in zip(pull(cotangent), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_gradients_for_each_sample_by_vmap_are_those_of_each():
    tensors = operands(3)
    of_one = torch.func.grad(lambda *one: weighted(*(x[None] for x in one)), argnums=(0, 1, 2))
    found = torch.func.vmap(of_one)(*tensors)
    for sample in range(3):
        each = gradients_of([x[sample : sample + 1] for x in tensors])
        for one, other in zip(found, each, strict=True):
            torch.testing.assert_close(one[sample : sample + 1], other, rtol=2e-2, atol=2e-2)


def test_vmap_of_a_forward_is_that_of_each():
    q, k, v = (torch.stack([x, x.flip(0)]) for x in operands())
    call = functools.partial(attngen.attention, mask="causal", backend="cuda")
    found = torch.func.vmap(call)(q, k, v)
    for sample in range(2):
        assert torch.equal(found[sample], call(q[sample], k[sample], v[sample]))


def test_vmap_over_tensors_given_by_name_is_that_of_each():
    tensors = operands()
    bias = oracle.randn(3, 4, 70, 72, seed=5)[..., :70]
    sink, slopes = (oracle.randn(3, 4, dtype=torch.float32, seed=seed) for seed in (6, 7))

    def call(bias, sink, slopes):
        named = {"bias": bias, "sink": sink, "alibi_slopes": slopes.abs(), "softmax": "learnable"}
        return weighted(*tensors, **named)

    found = torch.func.vmap(torch.func.grad(call, argnums=(0, 1)))(bias, sink, slopes)
    for sample in range(3):
        leaves = [x[sample].clone().requires_grad_() for x in (bias, sink)]
        expected = torch.autograd.grad(call(*leaves, slopes[sample]), leaves)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[sample], other, rtol=2e-2, atol=2e-2)


def dropping(q, k, v, rng_state=None):
    arguments = {"dropout_p": 0.5, "rng_state": rng_state, "backend": "cuda"}
    out, aux = attngen.attention(q, k, v, **arguments, return_rng_state=True)
    return out, aux.rng_state


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_drops_as_its_randomness_says(randomness):
    q, k, v = operands()
    same = q[None].expand(2, *q.shape)
    call = functools.partial(dropping, k=k, v=v)
    out, states = torch.func.vmap(call, randomness=randomness)(same)
    states = states.expand(2, 2)
    assert torch.equal(out[0], out[1]) == (randomness == "same")
    for sample in range(2):
        assert torch.equal(out[sample], call(q, rng_state=states[sample].clone())[0])


def test_vmap_that_is_told_nothing_of_randomness_draws_none():
    tensors = [x[None] for x in operands()]
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(dropping)(*tensors)


def test_gradients_for_each_sample_keep_what_its_forward_kept():
    tensors = operands()
    states = torch.arange(4, device=oracle.DEVICE).view(2, 2)

    def of_q(q, state):
        return torch.func.grad(lambda q: dropping(q, *tensors[1:], state)[0].float().sum())(q)

    found = torch.func.vmap(of_q, in_dims=(None, 0))(tensors[0], states)
    for sample in range(2):
        leaf = tensors[0].clone().requires_grad_()
        out = dropping(leaf, *tensors[1:], states[sample])[0]
        (expected,) = torch.autograd.grad(out.float().sum(), leaf)
        torch.testing.assert_close(found[sample], expected, rtol=2e-2, atol=2e-2)


def test_vmap_orders_the_sequences_of_each_sample_whatever_the_schedule():
    sequences = 40  # of fewer, kernels read no schedule
    tensors = [oracle.randn(sequences, 150, 1, 64, seed=n) for n in range(3)]
    lengths = torch.tensor([[1, 150] * 20, [150, 1] * 20], dtype=torch.int32, device=oracle.DEVICE)

    def call(lengths, schedule=None):
        used = {"seqused_q": lengths, "seqused_kv": lengths, "schedule": schedule}
        return attngen.attention(*tensors, mask="padding_causal", **used, backend="cuda")

    schedule = attngen.Schedule()
    found = torch.func.vmap(functools.partial(call, schedule=schedule))(lengths)
    for sample in range(2):
        assert torch.equal(found[sample], call(lengths[sample]))
    assert torch.equal(call(lengths[1], schedule), call(lengths[1]))


@pytest.mark.parametrize("transformed_first", [False, True])
def test_schedule_serves_calls_under_transforms_and_others(transformed_first):
    lengths = torch.arange(0, 41 * 3, 3, dtype=torch.int32, device=oracle.DEVICE)
    q, k, v = (oracle.randn(120, 1, 64, seed=n) for n in range(3))
    schedule = attngen.Schedule()

    def weight(x):
        given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), lengths)
        out = attngen.attention(x, k, v, layout="thd", **given, schedule=schedule, backend="cuda")
        return out.float().square().sum()

    def by_func():
        return torch.func.grad(weight)(q)

    def by_autograd():
        weight(q)
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(weight(leaf), leaf)[0]

    order = (by_func, by_autograd)[:: 1 if transformed_first else -1]
    first, second, again = (each() for each in (*order, order[0]))
    torch.testing.assert_close(first, second, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(first, again, rtol=2e-2, atol=2e-2)


def test_second_derivative_by_func_is_refused():
    tensors = operands()
    gradient = torch.func.grad(lambda q: weighted(q, *tensors[1:]))
    with pytest.raises(SpecError, match="second derivative"):
        torch.func.grad(lambda q: gradient(q).float().square().sum())(tensors[0])


def test_forward_mode_derivative_is_refused():
    q, k, v = operands()
    for function in (weighted, torch.func.grad(weighted)):
        with pytest.raises(SpecError, match="no forward-mode"):
            torch.func.jvp(lambda q, call=function: call(q, k, v), (q,), (q,))
    q.requires_grad_()
    out = attngen.attention(q, k, v, backend="cuda")
    with forward_ad.dual_level(), pytest.raises(SpecError, match="no forward-mode"):
        torch.autograd.grad(out, q, forward_ad.make_dual(out.detach(), out.detach()))
