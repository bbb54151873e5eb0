"""Every layout computes what its sequences compute alone, and reads no padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.reference import attention
from attngen.spec import layouts

H_Q, H_KV, D, D_V = 4, 2, 6, 3
NAN = math.nan
PACKED = [name for name in layouts.NAMES if layouts.parse(name).packing != "none"]
PAGED = [name for name in layouts.NAMES if layouts.parse(name).paged]
OPTIONS = {
    "mask": "padding_causal_bottom_right",
    "window": (3, -1),
    "softcap": 2.0,
    "alibi_slopes": True,
    "softmax": "learnable",
    "sink": torch.tensor([0.3, -1.0, 2.0, 0.0]),
    "dropout_p": 0.3,
    "rng_state": torch.tensor([5, 6]),
    "score_mod": lambda s, b, h, i, j: s + 0.25 * b + 0.125 * (i - j),
    "mask_mod": lambda b, h, i, j: (i + 2 * j + b) % 5 != 0,
}


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def to_format(x, fmt):
    """[b, s, h, d] into a dense format."""
    return x.permute(["bshd".index(axis) for axis in fmt])


def from_format(x, fmt):
    """A dense format into [b, s, h, d]."""
    return x.permute([fmt.index(axis) for axis in "bshd"])


def dense(batch, s_q, s_kv, h_kv=H_KV, d_v=D_V, seed=0):
    """Random float64 Q, K and V in bshd."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(batch, s_q, H_Q, D), (batch, s_kv, h_kv, D), (batch, s_kv, h_kv, d_v)]
    return [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]


def alone(q, k, v, used_q, used_kv, bias=None, **options):
    """O and LSE of each sequence from a call of its own, with its b where b matters.

    Sequence b is cut to its lengths and called in a batch of b + 1 copies of itself.
    """
    for b, (n_q, n_kv) in enumerate(zip(used_q, used_kv, strict=True)):
        cut = [
            x[b, :n].expand(b + 1, *x[b, :n].shape)
            for x, n in zip((q, k, v), (n_q, n_kv, n_kv), strict=True)
        ]
        bias_b = None if bias is None else bias[b : b + 1, :, :n_q, :n_kv]
        mask = options["mask"].removeprefix("padding_")
        out, aux = attention(*cut, bias=bias_b, **{**options, "mask": mask})
        yield out[b], aux.lse[b]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


lengths_lists = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None)
@given(lengths_lists, st.booleans())
def test_thd_any_lengths_and_gaps_equal_sequences_alone(cases, with_bias):
    used_q, used_kv, gap_q, gap_kv = (list(column) for column in zip(*cases, strict=True))
    q, k, v = dense(len(cases), 9, 9)
    bias = torch.randn(len(cases), 1, 9, 9, dtype=torch.float64) if with_bias else None
    at_q = cumulative([n + gap for n, gap in zip(used_q, gap_q, strict=True)])
    at_kv = cumulative([n + gap for n, gap in zip(used_kv, gap_kv, strict=True)])

    def pack(x, used, offsets):  # Two tokens after the last sequence belong to none.
        packed = torch.full((int(offsets[-1]) + 2, *x.shape[2:]), NAN, dtype=x.dtype)
        for b, n in enumerate(used):
            packed[offsets[b] : offsets[b] + n] = x[b, :n]
        return packed

    out, aux = attention(
        pack(q, used_q, at_q),
        pack(k, used_kv, at_kv),
        pack(v, used_kv, at_kv),
        layout="thd",
        bias=bias,
        cu_seqlens_q=cumulative(used_q),
        cu_seqlens_kv=cumulative(used_kv),
        cu_seqlens_q_padded=at_q,
        cu_seqlens_kv_padded=at_kv,
        **OPTIONS,
    )
    want, want_lse = torch.zeros_like(out), torch.full_like(aux.lse, -math.inf)
    for b, (o, lse) in enumerate(alone(q, k, v, used_q, used_kv, bias, **OPTIONS)):
        want[at_q[b] : at_q[b] + used_q[b]] = o
        want_lse[:, at_q[b] : at_q[b] + used_q[b]] = lse
    close(out, want)
    close(aux.lse, want_lse)


def test_thd_documented_example_leaves_gaps_empty():
    # [a, PAD, b, b, c, PAD, PAD, d, d]
    lengths, offsets = int32(0, 1, 3, 4, 6), int32(0, 2, 4, 7, 9)
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    out, aux = attention(
        q,
        k,
        v,
        layout="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
    )
    gaps = [row for row in range(9) if not out[row].any()]
    assert gaps == [1, 5, 6]
    assert aux.lse.shape == (2, 9)
    assert [t for t in range(9) if aux.lse[0, t] == -math.inf] == [1, 5, 6]
    torch.testing.assert_close(out[0], v[0])  # a sequence of one token is its own value


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8)), min_size=1, max_size=3),
    st.sampled_from(["sbhd", "bshd", "bhsd"]),
    st.booleans(),
)
def test_padding_poisoned_with_nan_equals_sequences_cut(lengths, fmt, by_cu_seqlens):
    used_q, used_kv = (list(column) for column in zip(*lengths, strict=True))
    q, k, v = dense(len(lengths), 7, 8)
    poisoned = [x.clone() for x in (q, k, v)]
    for x, used in zip(poisoned, (used_q, used_kv, used_kv), strict=True):
        for b, n in enumerate(used):
            x[b, n:] = NAN
    leaves = [to_format(x, fmt).contiguous().requires_grad_() for x in poisoned]
    if by_cu_seqlens:
        said = {"cu_seqlens_q": cumulative(used_q), "cu_seqlens_kv": cumulative(used_kv)}
    else:
        said = {"seqused_q": int32(*used_q), "seqused_kv": int32(*used_kv)}
    bias = torch.randn(len(lengths), 1, 7, 8, dtype=torch.float64)
    out, aux = attention(*leaves, layout=fmt, bias=bias, **said, **OPTIONS)
    # The gradients of padding rows of O, NaN included, are not read either.
    d_out = torch.ones(len(lengths), 7, H_Q, D_V, dtype=torch.float64)
    for b, n in enumerate(used_q):
        d_out[b, n:] = NAN
    grads = torch.autograd.grad(out, leaves, to_format(d_out, fmt))

    want, want_lse = (
        torch.zeros(len(lengths), 7, H_Q, D_V).double(),
        torch.full_like(aux.lse, -math.inf),
    )
    for b, (o, lse) in enumerate(alone(q, k, v, used_q, used_kv, bias, **OPTIONS)):
        want[b, : used_q[b]], want_lse[b, :, : used_q[b]] = o, lse
    close(from_format(out, fmt), want)
    close(aux.lse, want_lse)
    for grad, used in zip(grads, (used_q, used_kv, used_kv), strict=True):
        assert grad.isfinite().all()
        for b, n in enumerate(used):
            assert not from_format(grad, fmt)[b, n:].any()


def test_lengths_count_whatever_the_masks_name():
    q, k, v = dense(2, 5, 7)
    said = {"seqused_q": int32(5, 3), "seqused_kv": int32(2, 7)}
    for mask in ("none", "causal", "causal_bottom_right"):
        name = "padding" if mask == "none" else f"padding_{mask}"
        by_padding, _ = attention(q, k, v, mask=name, **said)
        by_lengths, _ = attention(q, k, v, mask=mask, **said)
        full, _ = attention(q, k, v, mask=mask)
        assert torch.equal(by_padding, by_lengths)
        assert not torch.allclose(by_lengths, full)


@pytest.mark.parametrize("name", PACKED)
def test_packed_equals_three_tensors_with_a_packed_gradient(name):
    layout = layouts.parse(name)
    h_kv = H_Q if layout.one_length else H_KV
    if layout.q_format == "thd":
        cu = int32(0, 4, 4, 9)
        said = (
            {"cu_seqlens_q": cu} if layout.one_length else {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        )
        plain = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        q, k, v = (x[0] for x in dense(1, 9, 9, h_kv, D))
    else:
        said = {"seqused_q": int32(5, 2)} if layout.one_length else {"seqused_kv": int32(5, 2)}
        plain = {"seqused_q": int32(5, 2), "seqused_kv": int32(5, 2)} if layout.one_length else said
        q, k, v = (to_format(x, layout.q_format) for x in dense(2, 5, 5, h_kv, D))
    axis = -3 if layout.packing in ("qkv_3hd", "kv_2hd") else -2
    parts = (q, k, v) if layout.one_length else (k, v)
    packed = torch.stack(parts, dim=axis).requires_grad_()
    given = (packed,) if layout.one_length else (q, packed)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    options = OPTIONS | {"bias": torch.randn(1, H_Q, 9, 9).double()[..., :5, :5]}
    out, aux = attention(*given, layout=name, **said, **options)
    want, want_aux = attention(*leaves, layout=layout.q_format, **plain, **options)
    assert torch.equal(out, want)
    assert torch.equal(aux.lse, want_aux.lse)
    (grad,) = torch.autograd.grad(out.square().sum(), packed)
    grads = torch.autograd.grad(want.square().sum(), leaves)[-len(parts) :]
    close(grad, torch.stack(grads, dim=axis))


@pytest.mark.parametrize(
    ("q_format", "kv_format"),
    [("sbhd", "bshd"), ("bshd", "sbhd"), ("thd", "bshd"), ("thd", "sbhd")],
)
def test_mixed_formats_equal_sequences_alone(q_format, kv_format):
    q, k, v = dense(3, 6, 8)
    used_q, used_kv = [6, 0, 3], [8, 5, 2]
    kv = [to_format(x, kv_format) for x in (k, v)]
    if q_format == "thd":
        packed = torch.cat([q[b, :n] for b, n in enumerate(used_q)])
        said, given = {"cu_seqlens_q": cumulative(used_q)}, packed
    else:
        said, given = {"seqused_q": int32(*used_q)}, to_format(q, q_format)
    name = f"{q_format}_{kv_format}_{kv_format}"
    options = OPTIONS | {"seqused_kv": int32(*used_kv)}
    out, aux = attention(given, *kv, layout=name, **said, **options)
    assert out.shape == (*given.shape[:-1], D_V)
    assert aux.lse.shape == ((H_Q, 9) if q_format == "thd" else (3, H_Q, 6))
    for b, (o, lse) in enumerate(alone(q, k, v, used_q, used_kv, **OPTIONS)):
        start, n = sum(used_q[:b]), used_q[b]
        if q_format == "thd":
            close(out[start : start + n], o)
            close(aux.lse[:, start : start + n], lse)
        else:
            close(from_format(out, q_format)[b, :n], o)
            close(aux.lse[b, :, :n], lse)


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("page_sizes", [(1, 1), (4, 4), (3, 5)])
def test_paged_with_nan_outside_the_lengths_equals_dense(name, page_sizes):
    layout = layouts.parse(name)
    q, k, v = dense(3, 4, 10)
    used = [10, 0, 7]
    make = torch.Generator().manual_seed(1)

    def page(x, page_size):
        n = -(-10 // page_size)
        pages = torch.full((3 * n + 2, page_size, *x.shape[2:]), NAN, dtype=x.dtype)
        table = torch.randperm(3 * n + 2, generator=make)[: 3 * n].view(3, n).int()
        for b, length in enumerate(used):
            for j in range(length):
                pages[table[b, j // page_size], j % page_size] = x[b, j]
            table[b, -(-length // page_size) :] = -1
        return to_format(pages, layout.kv_format), table

    (k_pages, k_table), (v_pages, v_table) = page(k, page_sizes[0]), page(v, page_sizes[1])
    options = OPTIONS | {"seqused_kv": int32(*used)}
    if layout.q_format == "thd":
        given, said = q.flatten(0, 1), {"cu_seqlens_q": int32(0, 4, 8, 12)}
    else:
        given, said = to_format(q, layout.q_format), {}
    tables = (k_table, v_table)
    out, aux = attention(given, k_pages, v_pages, layout=name, page_table=tables, **said, **options)
    want, want_aux = attention(q, k, v, **options)
    got = (
        out.unflatten(0, (3, 4)) if layout.q_format == "thd" else from_format(out, layout.q_format)
    )
    close(got, want)
    lse = aux.lse.unflatten(1, (3, 4)).transpose(0, 1) if layout.q_format == "thd" else aux.lse
    close(lse, want_aux.lse)


def test_paged_one_table_serves_k_and_v():
    q, k, v = dense(2, 3, 4)
    table = int32(1, 0, 3, 2).view(2, 2)
    pages = [x.reshape(4, 2, H_KV, -1)[[1, 0, 3, 2]] for x in (k, v)]
    said = {"seqused_kv": int32(4, 3)}
    out, _ = attention(q, *pages, layout="paged_kv_bshd_bshd_bshd", page_table=table, **said)
    assert torch.equal(out, attention(q, k, v, **said)[0])
