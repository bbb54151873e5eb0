"""Attentions over parts of the keys in float32, merged, beside float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attngen
from attngen import SpecError

from . import cases, oracle

pytestmark = pytest.mark.gpu
KERNELS = [cases.spec(d, partial=True, mask=mask) for d in (64, 128) for mask in ("none", "causal")]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_ring_of_parts_is_the_whole(layout, d):
    """The second half of the queries sees the first half of the keys, and its own under a causal
    mask: what a GPU of a context-parallel group computes."""
    q, k, v = oracle.operands(2, 4, 2, 260, 260, d, layout=layout)
    expected = oracle.truth(q, k, v, layout=layout, mask="causal")
    (early_k, late_k), (early_v, late_v) = (x.chunk(2, layout.index("s")) for x in (k, v))
    queries = q.chunk(2, layout.index("s"))[1]
    given = {"layout": layout, "out_dtype": torch.float32, "return_lse": True, "backend": "cuda"}
    found = [
        attngen.attention(queries, early_k, early_v, **given),
        attngen.attention(queries, late_k, late_v, mask="causal", **given),
    ]
    assert {x.dtype for x, _ in found} == {torch.float32}
    outs, lses = [x for x, _ in found], [aux.lse for _, aux in found]
    out, lse = attngen.merge_states(outs, lses, layout=layout, out_dtype=q.dtype)
    late = replace(
        expected, out=expected.out.chunk(2, layout.index("s"))[1], lse=expected.lse.chunk(2, 2)[1]
    )
    oracle.check(out, lse, late, layout)


def test_gradients_of_parts_from_the_whole_output_are_those_of_the_whole():
    q, k, v = oracle.operands(1, 4, 2, 130, 300, 64)
    d_o = oracle.randn(*q.shape, seed=9)
    out, lse, *_ = torch.ops.attngen.forward(q, k, v)
    dq, dk, dv = torch.ops.attngen.backward(d_o, None, q, k, v, out, lse)[:3]
    parts = zip(k.split((100, 200), 1), v.split((100, 200), 1), strict=True)
    found = [torch.ops.attngen.backward(d_o, None, q, *pair, out, lse)[:3] for pair in parts]
    of_q, of_k, of_v = zip(*found, strict=True)
    close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(of_q[0].float() + of_q[1], dq.float(), **close)
    torch.testing.assert_close(torch.cat(of_k, 1), dk, **close)
    torch.testing.assert_close(torch.cat(of_v, 1), dv, **close)


LENGTHS = torch.tensor([0, 70, 71, 200], dtype=torch.int32)
VARIANTS = {
    "packed": ("thd", {"mask": "causal", "softmax": "off_by_one"}),
    "scores": ("bshd", {"mask": "causal", "alibi_slopes": True, "softcap": 3.0}),
    "window": ("bshd", {"window": (30, 5), "return_max_logit": True}),
    "bias": ("bshd", {"bias": (1, 4, 200, 200)}),
    "mask": ("bshd", {"attn_mask": True, "dropout_p": 0.25}),
    "any strides": ("bshd", {"mask": "causal"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_output_in_float32_is_the_one_that_is_rounded(name):
    layout, arguments = VARIANTS[name]
    batch = () if layout == "thd" else (1,)
    d = 67 if name == "any strides" else 64
    q, k, v = (oracle.randn(*batch, 200, heads, d, seed=heads) for heads in (4, 2, 1))
    v = v.expand(k.shape)
    given = {"layout": layout, "backend": "cuda", "return_lse": True, **arguments}
    if layout == "thd":
        given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), LENGTHS.to(oracle.DEVICE))
    if "bias" in given:
        given["bias"] = oracle.randn(*given["bias"], seed=7)
    if "attn_mask" in given:
        given["attn_mask"] = oracle.randn(1, 1, 200, 200, seed=8) > 0
        given["rng_state"] = torch.tensor([5, 0], device=oracle.DEVICE)
    rounded, wide = (
        attngen.attention(q, k, v, out_dtype=x, **given) for x in (None, torch.float32)
    )
    assert wide[0].dtype == torch.float32 and not torch.equal(wide[0].to(q.dtype).float(), wide[0])
    torch.testing.assert_close(wide[0].to(q.dtype), rounded[0], rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(wide[1].lse, rounded[1].lse)


def test_gradient_of_a_float32_output_is_refused():
    q, k, v = oracle.operands(1, 2, 2, 70, 70, 64)
    q.requires_grad_()
    with pytest.raises(SpecError, match="float32 output"):
        attngen.attention(q, k, v, out_dtype=torch.float32, backend="cuda")
    with torch.no_grad():
        out = attngen.attention(q, k, v, out_dtype=torch.float32, backend="cuda")
    assert out.dtype == torch.float32
