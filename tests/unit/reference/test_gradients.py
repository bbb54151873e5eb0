"""Gradients of the reference: finite differences, the written backward, and no NaN anywhere."""

import math

import pytest
import torch

from attngen.reference import attention, dropout_keep_mask

NAN = math.nan
STATE = torch.tensor([3, 14])


def leaves(*shapes, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


VARIANTS = {
    "plain": {},
    "causal": {"mask": "causal"},
    "window": {"window": (1, 1), "bottom_right": True},
    "empty_rows": {"mask": "causal_bottom_right", "window": (0, 0)},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": True, "mask": "causal_bottom_right"},
    "dropout": {"dropout_p": 0.4, "rng_state": STATE},
    "off_by_one": {"softmax": "off_by_one"},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s * s + 0.5 * torch.sin(s) * (i - j)},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
    "lengths": {"seqused_q": torch.tensor([2, 4]).int(), "seqused_kv": torch.tensor([3, 0]).int()},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_of_qkv_and_lse_passes_gradcheck(variant):
    q, k, v = leaves((2, 4, 4, 2), (2, 3, 2, 2), (2, 3, 2, 3))

    def run(q, k, v):
        out, aux = attention(q, k, v, **VARIANTS[variant])
        return out, torch.where(aux.lse == -math.inf, 0.0, aux.lse)

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=variant != "plain")


@pytest.mark.parametrize(
    "shape", [(2, 4, 3, 5), (1, 4, 3, 5), (2, 1, 3, 5), (1, 1, 3, 5), (1, 1, 1, 5)]
)
@pytest.mark.parametrize("bias_type", ["post_scale", "pre_scale"])
def test_gradient_of_bias_in_every_broadcast_passes_gradcheck(shape, bias_type):
    q, k, v, bias = leaves((2, 3, 4, 2), (2, 5, 2, 2), (2, 5, 2, 2), shape)

    def run(q, bias):
        options = {"mask": "causal", "softcap": 1.5, "dropout_p": 0.3, "rng_state": STATE}
        return attention(q, k, v, bias=bias, bias_type=bias_type, **options)[0]

    assert torch.autograd.gradcheck(run, (q, bias), fast_mode=True)
    (grad,) = torch.autograd.grad(run(q, bias).square().sum(), bias)
    assert grad.shape == shape
    assert grad.any()


def test_gradient_of_sink_and_slopes_passes_gradcheck():
    q, k, v, sink, slopes = leaves((2, 4, 4, 2), (2, 3, 2, 2), (2, 3, 2, 2), (4,), (2, 4))

    def run(q, sink, slopes):
        # At the bottom right of 4 x 3, query 0 sees the sink alone.
        out, aux = attention(
            q,
            k,
            v,
            mask="causal_bottom_right",
            softmax="learnable",
            sink=sink,
            alibi_slopes=slopes,
            dropout_p=0.25,
            rng_state=STATE,
        )
        return out, aux.lse

    assert torch.autograd.gradcheck(run, (q, sink, slopes))


@pytest.mark.parametrize("bias_type", ["post_scale", "pre_scale"])
def test_gradients_equal_the_written_backward(bias_type):
    """The equations of the backward pass, which kernels implement, against autograd."""
    b, h, s_q, s_kv, d, scale, cap, p = 2, 3, 5, 6, 4, 0.4, 1.2, 0.25
    q, k, v, bias = leaves((b, h, s_q, d), (b, h, s_kv, d), (b, h, s_kv, d), (b, 1, s_q, s_kv))
    (sink,) = leaves((h,), seed=1)
    out, aux = attention(
        q,
        k,
        v,
        layout="bhsd",
        mask="causal",
        softmax_scale=scale,
        softcap=cap,
        bias=bias,
        bias_type=bias_type,
        softmax="learnable",
        sink=sink,
        dropout_p=p,
        rng_state=STATE,
    )
    torch.manual_seed(2)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(aux.lse)
    got = torch.autograd.grad((out, aux.lse), (q, k, v, bias, sink), (d_out, d_lse))

    with torch.no_grad():
        pre = bias if bias_type == "pre_scale" else 0.0
        capped = cap * torch.tanh((q @ k.mT + pre) * scale / cap)
        scores = capped + (bias if bias_type == "post_scale" else 0.0)
        seen = torch.ones(s_q, s_kv).tril().bool()
        probabilities = torch.where(seen, torch.exp(scores - aux.lse[..., None]), 0.0)
        kept = dropout_keep_mask(STATE, p, b, h, s_q, s_kv).double() / (1 - p)
        delta = (d_out * out).sum(-1) - d_lse
        d_v = (probabilities * kept).mT @ d_out
        d_s = probabilities * (kept * (d_out @ v.mT) - delta[..., None])
        d_bias = d_s.sum(1, keepdim=True)
        d_s = d_s * (1 - (capped / cap) ** 2)
        if bias_type == "pre_scale":
            d_bias = scale * d_s.sum(1, keepdim=True)
        d_sink = -(torch.exp(sink[:, None] - aux.lse) * delta).sum((0, 2))
        want = (scale * d_s @ k, scale * d_s.mT @ q, d_v, d_bias, d_sink)
    for name, one, other in zip(("q", "k", "v", "bias", "sink"), got, want, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("softmax", ["vanilla", "off_by_one", "learnable"])
@pytest.mark.parametrize("lse_too", [False, True])
def test_gradient_of_empty_rows_is_zero_and_never_nan(softmax, lse_too):
    q, k, v, bias = leaves((1, 5, 2, 3), (1, 3, 2, 3), (1, 3, 2, 3), (1, 2, 5, 3))
    (sink,) = leaves((2,))
    inputs = [q, k, v, bias] + ([sink] if softmax == "learnable" else [])
    out, aux = attention(
        q,
        k,
        v,
        mask="causal_bottom_right",
        softcap=1.0,
        bias=bias,
        softmax=softmax,
        sink=sink if softmax == "learnable" else None,
        alibi_slopes=True,
        score_mod=lambda s, b, h, i, j: s / (i - j + 2).sqrt(),  # 1/0 and NaN where hidden
    )
    outputs = (out, aux.lse) if lse_too else (out,)
    grads = torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :2].any()  # queries 0 and 1 see nothing
    assert not grads[3][:, :, :2].any()
    assert grads[0][:, 3:].any()


def test_gradient_all_keys_hidden_is_zero():
    q, k, v = leaves((1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4))
    hidden = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    out, aux = attention(q, k, v, attn_mask=hidden)
    total = out.sum() + torch.where(aux.lse == -math.inf, 0.0, aux.lse).sum()
    for grad in torch.autograd.grad(total, (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("bias_type", ["post_scale", "pre_scale"])
def test_gradient_nan_in_masked_bias_reaches_nothing(bias_type):
    q, k, v, bias = leaves((1, 4, 2, 3), (1, 4, 2, 3), (1, 4, 2, 3), (1, 2, 4, 4))
    poisoned = bias.detach().clone()
    poisoned[..., 0, 1:] = NAN
    poisoned.requires_grad_()
    results = []
    for b in (bias, poisoned):
        out, _ = attention(q, k, v, mask="causal", softcap=1.0, bias=b, bias_type=bias_type)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, b))])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_gradient_thd_gap_rows_are_zero_despite_nan():
    q, k, v = leaves((8, 2, 3), (8, 2, 3), (8, 2, 3))
    gaps = [2, 3, 7]
    with torch.no_grad():
        for x in (q, k, v):
            x[gaps] = NAN
    lengths, offsets = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 4, 8]).int()
    out, _ = attention(
        q,
        k,
        v,
        layout="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
    )
    d_out = torch.ones_like(out)
    d_out[gaps] = NAN
    for grad in torch.autograd.grad(out, (q, k, v), d_out):
        assert not grad[gaps].any()
        assert grad.isfinite().all()
    assert not out[gaps].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradient_dtypes_are_those_of_the_inputs(dtype):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in leaves(*[(1, 4, 2, 8)] * 3))
    bias = torch.randn(1, 1, 4, 4, dtype=dtype, requires_grad=True)
    sink = torch.randn(2, requires_grad=True)
    out, _ = attention(q, k, v, bias=bias, softmax="learnable", sink=sink)
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias, sink))
    assert [g.dtype for g in grads] == [dtype] * 4 + [torch.float32]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias, sink)]
    want, _ = attention(*wide[:3], bias=wide[3], softmax="learnable", sink=wide[4])
    for got, exact in zip(grads, torch.autograd.grad(want.sum(), wide), strict=True):
        # One rounding to the input's dtype, and float32's error before it.
        bound = torch.finfo(got.dtype).eps / 2 * exact.abs() + 1e-5
        assert ((got.double() - exact).abs() <= bound).all()
