"""Biases on the kernels: refusals, graphs, infinities and tensors past 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch

import attngen
from attngen import SpecError, reference

from . import oracle
from .test_bias import CASES, hold

pytestmark = pytest.mark.gpu


def test_gradient_of_one_column_for_all_keys_is_refused():
    q, k, v = oracle.operands(2, 4, 2, 64, 64, 64)
    bias = oracle.randn(2, 4, 64, 1).requires_grad_()
    oracle.check_call(q, k, v, bias=bias.detach())
    with pytest.raises(SpecError, match="one column for 64 keys.*expand"):
        attngen.attention(q, k, v, bias=bias, backend="cuda")
    with torch.no_grad():
        attngen.attention(q, k, v, bias=bias, backend="cuda")
    one_key = [x[:, :1].contiguous() for x in (k, v)]
    out = attngen.attention(q, *one_key, bias=bias, backend="cuda")
    assert torch.autograd.grad(out.sum(), bias)[0].shape == bias.shape


@pytest.mark.device
def test_graph_replay_follows_a_bias_that_changes():
    tensors, arguments = CASES[0].given()
    bias = arguments.pop("bias")
    inputs = [x.requires_grad_() for x in (*tensors, bias)]

    def run():
        out = attngen.attention(
            *inputs[:3], **arguments, bias=inputs[3], backend="cuda", deterministic=True
        )
        return out, *torch.autograd.grad(out.sum(), inputs)

    graph, found = oracle.capture(run)
    for seed in range(3):
        with torch.no_grad():
            bias.copy_(CASES[0].bias(seed))
        graph.replay()
        assert oracle.same(found, run())


def test_compiled_call_takes_its_bias():
    tensors, arguments = CASES[1].given()
    call = torch.compile(
        lambda q, k, v, bias: attngen.attention(q, k, v, **{**arguments, "bias": bias}) * 2,
        backend="aot_eager",
        fullgraph=True,
    )
    expected = attngen.attention(*tensors, **arguments, backend="cuda") * 2
    assert torch.equal(call(*tensors, arguments["bias"]), expected)


def test_op_bias_that_does_not_fit_is_refused():
    q, k, v = oracle.operands(2, 2, 2, 64, 64, 64)
    for wrong in (q.new_ones(2, 2, 64, 63), q.new_ones(3, 1, 64, 64), q.new_ones(1, 2, 2, 64, 64)):
        with pytest.raises(SpecError, match="bias needs bfloat16"):
            torch.ops.attngen.forward(q, k, v, bias=wrong)
    with pytest.raises(SpecError, match="bias needs bfloat16"):
        torch.ops.attngen.forward(q, k, v, bias=torch.ones(64, 64, device=oracle.DEVICE))
    with pytest.raises(SpecError, match="bias_type='alibi'"):
        torch.ops.attngen.forward(q, k, v, bias=q.new_ones(64, 64), bias_type="alibi")


@pytest.mark.parametrize("d", [64, 128, 256])
def test_bias_of_minus_infinity_hides_what_it_meets(d):
    """Whole rows of it, too: they are 0, and so are their gradients."""
    tensors = oracle.operands(2, 4, 2, 200, 264, d)
    bias = torch.zeros(1, 4, 200, 264, device=oracle.DEVICE, dtype=torch.bfloat16)
    bias[..., 60:90] = -math.inf
    bias[:, 1:3, 30:140] = -math.inf
    oracle.check_call(*tensors, bias=bias)


def test_bias_at_hidden_positions_is_never_read_into_a_result():
    tensors = oracle.operands(2, 4, 2, 300, 300, 128)
    bias = oracle.randn(1, 4, 300, 300, seed=9)
    hidden = ~torch.ones(300, 300, dtype=torch.bool, device=oracle.DEVICE).tril()
    for value in (math.nan, math.inf):
        oracle.check_call(*tensors, bias=torch.where(hidden, value, bias), mask="causal")


@pytest.mark.parametrize("d", [64, 128])
def test_gradients_with_a_bias_that_hides_or_is_hidden_are_zero_there(d):
    """By the kernel of its own at 64, beside dK and dV at 128."""
    tensors = oracle.operands(2, 4, 2, 200, 264, d)
    bias = oracle.randn(1, 4, 200, 264, seed=9)
    bias[..., 60:90] = -math.inf
    bias[:, 1:3, 30:140] = -math.inf
    seen = torch.ones(200, 264, dtype=torch.bool, device=oracle.DEVICE).tril()
    given = [x.detach().requires_grad_() for x in (*tensors, torch.where(seen, bias, math.nan))]
    out = attngen.attention(*given[:3], bias=given[3], mask="causal", backend="cuda")
    d_o = oracle.randn(*out.shape, seed=100)
    found = torch.autograd.grad(out, given, d_o)
    assert not any(x.isnan().any() for x in found)
    assert not found[3][~seen.expand(1, 4, -1, -1)].any() and not found[3][bias == -math.inf].any()
    assert not found[0][:, 30:140, 1:3].any() and found[3].any()


@pytest.mark.device
def test_gradient_of_a_bias_past_two_to_the_31_elements_is_right_in_its_last_rows():
    length, heads, rows = 16384, 9, 40
    q, k, v = oracle.operands(1, heads, 3, length, length, 128)
    bias = oracle.randn(1, heads, length, length, seed=9)
    assert bias.numel() > 1 << 31
    bias.requires_grad_()
    q.requires_grad_()
    out = attngen.attention(q, k, v, bias=bias, mask="causal", backend="cuda")
    d_o = oracle.randn(*out.shape, seed=5)
    _, dbias = torch.autograd.grad(out, (q, bias), d_o)
    del out
    for head in (0, heads - 1):
        some = [x.detach()[:, -rows:, head : head + 1] for x in (q, d_o)]
        keys = [x[:, :, head // 3 : head // 3 + 1] for x in (k, v)]
        part = bias.detach()[:, head : head + 1, -rows:]
        arguments = {"mask": "causal_bottom_right"}
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            wide = [x.to(dtype) for x in (some[0], *keys, some[1])]
            added = part.to(dtype).requires_grad_()
            found = reference.attention(*wide[:3], bias=added, **arguments)[0]
            results += torch.autograd.grad(found, added, wide[3])
        hold("dbias", dbias[:, head : head + 1, -rows:], *results)


@pytest.mark.device
def test_bias_large_call_is_right_in_its_rows():
    """More tiles than multiprocessors, keys in many blocks."""
    tensors = oracle.operands(2, 8, 8, 2048, 2048, 128)
    bias = oracle.randn(1, 8, 2048, 2048, seed=9)
    oracle.check_call(*tensors, bias=bias, mask="causal")
