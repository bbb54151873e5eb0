"""Arguments in other forms reach the kernels as their plain ones: the same bits, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attngen

from . import oracle

pytestmark = pytest.mark.gpu
SHAPE = (2, 4, 2, 40, 72, 64)


def results(leaves, *tensors, **arguments):
    """Output, LSE, and the gradients of both with respect to the leaves."""
    out, aux = attngen.attention(*tensors, **arguments, return_lse=True, backend="cuda")
    total = out.float().square().sum() + aux.lse.clamp(min=-9).sum()
    return out, aux.lse, *(torch.autograd.grad(total, leaves) if leaves else ())


def assert_same_gradients(found, wanted):
    """The last result is the gradient in another dtype, the others have the same bits."""
    assert oracle.same(found[:-1], wanted[:-1])
    assert torch.equal(found[-1], wanted[-1].to(found[-1].dtype))


@pytest.mark.parametrize("bias_type", ["post_scale", "pre_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bias_of_another_float(dtype, bias_type):
    q, k, v = (x.requires_grad_() for x in oracle.operands(*SHAPE))
    bias = oracle.randn(4, 40, 72, dtype=dtype)
    narrow = bias.bfloat16().requires_grad_()
    bias.requires_grad_()
    options = {"bias_type": bias_type, "deterministic": True}
    wanted = results([q, k, v, narrow], q, k, v, bias=narrow, **options)
    for _ in range(2):
        found = results([q, k, v, bias], q, k, v, bias=bias, **options)
        assert found[-1].dtype == dtype
        assert_same_gradients(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lowest_float32_bias_is_the_lowest_of_q(dtype):
    q, k, v = oracle.operands(*SHAPE, dtype=dtype)
    bias = torch.zeros(40, 72, device=q.device)
    bias[3], bias[5, 9:] = torch.finfo(torch.float32).min, -torch.inf
    bounded = bias.clamp(torch.finfo(dtype).min).to(dtype)
    bounded[5, 9:] = -torch.inf
    assert bounded[3].isfinite().all()
    wanted = results([], q, k, v, bias=bounded)
    assert oracle.same(results([], q, k, v, bias=bias), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_sink_of_another_float(dtype):
    q, k, v = (x.requires_grad_() for x in oracle.operands(*SHAPE))
    sink = oracle.randn(4, dtype=torch.bfloat16).to(dtype).requires_grad_()
    plain = sink.detach().float().requires_grad_()
    options = {"softmax": "learnable", "mask": "causal", "deterministic": True}
    wanted = results([q, k, v, plain], q, k, v, sink=plain, **options)
    for _ in range(2):
        found = results([q, k, v, sink], q, k, v, sink=sink, **options)
        assert_same_gradients(found, wanted)


def test_int64_lengths_of_packed_tokens():
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in oracle.operands(*SHAPE))
    ends = [torch.tensor(x, device=q.device) for x in ([0, 13, 71], [0, 60, 99])]
    options = {"layout": "thd", "mask": "causal", "deterministic": True}

    def call(dtype):
        given = {f"cu_seqlens_{n}": x.to(dtype) for n, x in zip(("q", "kv"), ends, strict=True)}
        return results([q, k, v], q, k, v, **given, **options)

    wanted = call(torch.int32)
    for _ in range(2):
        assert oracle.same(call(torch.int64), wanted)


def test_int64_table_and_lengths_of_pages():
    q = oracle.randn(2, 1, 4, 64)
    k, v = (oracle.randn(6, 16, 2, 64, seed=n) for n in (1, 2))
    table = torch.tensor([[2, 0, 5], [1, 3, 4]], device=q.device)
    used = torch.tensor([40, 17], device=q.device)

    def call(dtype):
        given = {"page_table": table.to(dtype), "seqused_kv": used.to(dtype)}
        layout = "paged_kv_bshd_bshd_bshd"
        return attngen.attention(q, k, v, layout=layout, **given, backend="cuda")

    wanted = call(torch.int32)
    for _ in range(2):
        assert torch.equal(call(torch.int64), wanted)


@pytest.mark.parametrize("name", ["bias", "attn_mask"])
def test_causal_bias(name):
    q, k, v = oracle.operands(*SHAPE)
    for make, mask in ((causal_upper_left, "causal"), (causal_lower_right, "causal_bottom_right")):
        wanted = attngen.attention(q, k, v, mask=mask, backend="cuda")
        found = attngen.attention(q, k, v, **{name: make(40, 72)}, backend="cuda")
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("window", [[9, 0], (np.int64(9), np.int32(0)), np.array([9, 0])], ids=str)
def test_window_of_other_integers(window):
    q, k, v = oracle.operands(*SHAPE)
    wanted = attngen.attention(q, k, v, window=(9, 0), backend="cuda")
    for _ in range(2):
        assert torch.equal(attngen.attention(q, k, v, window=window, backend="cuda"), wanted)


def test_none_is_the_default():
    q, k, v = oracle.operands(*SHAPE)
    wanted = attngen.attention(q, k, v, backend="cuda")
    for _ in range(2):
        found = attngen.attention(q, k, v, window=None, mask=None, softcap=None, backend="cuda")
        assert torch.equal(found, wanted)
