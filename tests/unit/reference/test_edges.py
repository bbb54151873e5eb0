"""Edges of the reference: rows that see nothing, length 0, batch 0, extreme scores, by-products."""

import math

import pytest
import torch

from attngen.reference import attention

INF = math.inf


def operands(b, h_q, h_kv, s_q, s_kv, d, d_v, dtype=torch.float64, seed=0):
    """Random Q, K and V in bhsd."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(b, h_q, s_q, d), (b, h_kv, s_kv, d), (b, h_kv, s_kv, d_v)]
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_softmax_large_scores_stay_finite():
    q, k, v = operands(1, 1, 1, 3, 4, 4, 4, torch.float32)
    out, aux = attention(
        q * 1e3, k, v, layout="bhsd", softmax="learnable", sink=torch.tensor([-5e4])
    )
    assert out.isfinite().all()
    want = attention((q * 1e3).double(), k.double(), v.double(), layout="bhsd")[1].lse
    torch.testing.assert_close(aux.lse.double(), want, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("softmax", ["vanilla", "off_by_one", "learnable"])
def test_empty_rows_give_zero_output_and_the_sinks_lse(softmax):
    q, k, v = operands(1, 2, 2, 4, 3, 3, 3, torch.float32)
    sink = torch.tensor([0.5, -2.0]) if softmax == "learnable" else None
    out, aux = attention(
        q,
        k,
        v,
        layout="bhsd",
        mask="causal_bottom_right",
        softmax=softmax,
        sink=sink,
        return_max_logit=True,
    )
    expected = {"vanilla": [-INF, -INF], "off_by_one": [0, 0], "learnable": [0.5, -2.0]}[softmax]
    # s_q = 4 and s_kv = 3 at the bottom right: query 0 sees nothing.
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 3))
    assert (out[:, :, 1:] != 0).all()
    assert aux.lse[0, :, 0].tolist() == expected
    assert aux.lse[:, :, 1:].isfinite().all()
    assert aux.max_logit.isfinite().all()


@pytest.mark.parametrize(("s_q", "s_kv"), [(0, 3), (3, 0), (0, 0)])
def test_length_zero_gives_zero_output_and_empty_max_logit(s_q, s_kv):
    q, k, v = operands(2, 2, 1, s_q, s_kv, 4, 3, torch.float32)
    out, aux = attention(
        q,
        k,
        v,
        layout="bhsd",
        score_mod=lambda s, b, h, i, j: s * 2,
        mask_mod=lambda b, h, i, j: i >= j,
        dropout_p=0.5,
        bias_type="alibi",
        return_max_logit=True,
    )
    assert torch.equal(out, torch.zeros(2, 2, s_q, 3))
    assert torch.equal(aux.lse, torch.full((2, 2, s_q), -INF))
    assert aux.max_logit.tolist() == [-INF, -INF]


def test_minus_infinity_bias_hides_a_key_like_a_mask():
    q, k, v = operands(1, 2, 2, 3, 4, 3, 3)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[0] = True
    hidden[1, 2] = True
    bias = torch.zeros(3, 4, dtype=torch.float64).masked_fill(hidden, -INF)
    out, aux = attention(q, k, v, layout="bhsd", bias=bias)
    want, want_aux = attention(q, k, v, layout="bhsd", attn_mask=~hidden)
    close(out, want)
    close(aux.lse, want_aux.lse)


def test_aux_holds_what_was_asked_for():
    q, k, v = operands(1, 2, 2, 3, 4, 3, 3)
    _, plain = attention(q, k, v, layout="bhsd")
    _, full = attention(q, k, v, layout="bhsd", return_max_logit=True, dropout_p=0.1)
    assert plain.lse is not None
    assert plain.max_logit is None
    assert plain.rng_state is None
    scores = torch.einsum("bhic,bhjc->bhij", q, k) / math.sqrt(3)
    close(full.max_logit, scores.amax(dim=(0, 2, 3)))
    assert full.rng_state.shape == (2,)


def test_batch_zero_gives_empty_results():
    out, aux = attention(*operands(0, 4, 2, 4, 5, 6, 3), layout="bhsd", return_max_logit=True)
    assert out.shape == (0, 4, 4, 3)
    assert aux.lse.shape == (0, 4, 4)
    assert aux.max_logit.tolist() == [-INF] * 4


def test_max_logit_padding_does_not_count():
    q, k, v = operands(2, 4, 4, 4, 6, 6, 3)
    k[0, :, 3:] = 1e3 * q[0, :, :1].sign()
    asked = {"layout": "bhsd", "return_max_logit": True}
    _, cut = attention(q, k, v, seqused_kv=torch.tensor([3, 6]).int(), **asked)
    _, first = attention(q[:1], k[:1, :, :3], v[:1, :, :3], **asked)
    _, second = attention(q[1:], k[1:], v[1:], **asked)
    close(cut.max_logit, torch.maximum(first.max_logit, second.max_logit))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_gradients_of_no_sequence_are_zeros(layout):
    shape = (0, 5, 2, 4) if layout == "bshd" else (5, 2, 4)
    q, k, v = (torch.full(shape, math.nan, requires_grad=True) for _ in range(3))
    sink, slopes = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    ends = torch.zeros(1, dtype=torch.int32)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends) if layout == "thd" else {}
    more = {"softmax": "learnable", "sink": sink, "alibi_slopes": slopes, **lengths}
    out, aux = attention(q, k, v, layout=layout, **more)
    assert out.shape == shape and not out.any()
    for of in (out, aux.lse):
        leaves = (q, k, v, sink, slopes)
        found = torch.autograd.grad(of.sum(), leaves, retain_graph=True)
        assert all(x.shape == y.shape for x, y in zip(found, leaves, strict=True))
        assert not any(x.any() for x in found)


def test_packed_sequences_without_tokens_have_gradients_of_zero() -> None:
    """All of the rows belong to no sequence."""
    q, k, v = (torch.randn(7, 2, 8, requires_grad=True) for _ in "qkv")
    none, starts = (torch.tensor(x, dtype=torch.int32) for x in ([0] * 4, [2, 3, 4, 7]))
    lengths = {f"cu_seqlens_{side}": none for side in ("q", "kv")}
    lengths |= {f"cu_seqlens_{side}_padded": starts for side in ("q", "kv")}
    out, aux = attention(q, k, v, layout="thd", **lengths)
    for result, leaves in (out, (q, k, v)), (aux.lse, (q, k)):
        found = torch.autograd.grad(result.sum(), leaves, retain_graph=True)
        assert not any(gradient.any() for gradient in found)
