"""The reference's arithmetic, against PyTorch's own attention and against plain loops."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attngen.call.table import AttentionCall
from attngen.errors import SpecError
from attngen.fragments.header import parse_header
from attngen.reference import attention, default_alibi_slopes, dropout_keep_mask
from attngen.reference.core import switched_scores

INF = math.inf


def operands(b, h_q, h_kv, s_q, s_kv, d, d_v, dtype=torch.float64, seed=0):
    """Random Q, K and V in bhsd."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(b, h_q, s_q, d), (b, h_kv, s_kv, d), (b, h_kv, s_kv, d_v)]
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def loops(q, k, v, *, seen, score, sink=None, keep=None, keep_factor=1.0):
    """O and LSE by plain Python: seen(b, h, i, j), score(dot, b, h, i, j), sink a list [h]."""
    (b_n, h_n, s_q, d), h_kv, s_kv, d_v = q.shape, k.shape[1], k.shape[2], v.shape[3]
    out, lse = torch.zeros(b_n, h_n, s_q, d_v, dtype=q.dtype), torch.full((b_n, h_n, s_q), -INF)
    lse, largest = lse.to(q.dtype), [-INF] * h_n
    ql, kl, vl = q.tolist(), k.tolist(), v.tolist()
    for b, h, i in itertools.product(range(b_n), range(h_n), range(s_q)):
        h_k = h // (h_n // h_kv)
        row = {}
        for j in range(s_kv):
            if seen(b, h, i, j):
                dot = sum(ql[b][h][i][c] * kl[b][h_k][j][c] for c in range(d))
                row[j] = score(dot, b, h, i, j)
        largest[h] = max(largest[h], *row.values(), -INF)
        total = sum(math.exp(x) for x in row.values())
        total += math.exp(sink[h]) if sink is not None else 0.0
        if total > 0:
            lse[b, h, i] = math.log(total)
        for j, x in row.items():
            if keep is None or keep[b, h, i, j]:
                for c in range(d_v):
                    out[b, h, i, c] += math.exp(x) / total * keep_factor * vl[b][h_k][j][c]
    return out, lse, torch.tensor(largest, dtype=q.dtype)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_output_plain_or_causal_equals_sdpa(heads, causal, lengths):
    q, k, v = operands(2, *heads, *lengths, 8, 6)
    out, _ = attention(q, k, v, layout="bhsd", mask="causal" if causal else "none")
    close(out, sdpa(q, k, v, is_causal=causal, enable_gqa=True))


def test_output_with_scale_mask_and_bias_equals_sdpa():
    q, k, v = operands(2, 4, 4, 5, 9, 8, 8)
    allowed = torch.rand(2, 1, 5, 9) > 0.4
    allowed[..., 0] = True
    bias = torch.randn(1, 4, 5, 9, dtype=torch.float64)
    got, _ = attention(
        q, k, v, layout="bhsd", mask="arbitrary", attn_mask=allowed, bias=bias, softmax_scale=0.3
    )
    close(got, sdpa(q, k, v, attn_mask=bias.masked_fill(~allowed, -INF), scale=0.3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_output_low_precision_is_one_rounding_from_float64(dtype):
    q, k, v = operands(2, 4, 2, 33, 40, 16, 16, dtype)
    out, aux = attention(q, k, v, layout="bhsd", mask="causal")
    want, want_aux = attention(q.double(), k.double(), v.double(), layout="bhsd", mask="causal")
    assert out.dtype == dtype
    assert aux.lse.dtype == torch.float32
    # Half a unit in the last place of the result, and float32's error in the accumulation.
    bound = torch.finfo(dtype).eps / 2 * want.abs() + 4e-6
    assert ((out.double() - want).abs() <= bound).all()
    torch.testing.assert_close(aux.lse.double(), want_aux.lse, rtol=1e-6, atol=1e-6)


def in_band(left, right, delta):
    return lambda b, h, i, j: i + delta - left <= j <= i + delta + right


BANDS = [
    # mask, window, bottom_right, (left, right, aligned to the bottom right)
    ("none", (2, 1), None, (2, 1, False)),
    ("none", (2, 1), True, (2, 1, True)),
    ("none", (0, None), None, (0, INF, False)),
    ("causal", (-1, -1), None, (INF, 0, False)),
    ("causal", (2, -1), None, (2, 0, False)),
    ("causal", (1, 5), True, (1, 0, True)),
    ("causal_bottom_right", (-1, -1), None, (INF, 0, True)),
    ("causal_bottom_right", (1, 3), None, (1, 0, True)),
]


@pytest.mark.parametrize(("mask", "window", "bottom_right", "expected"), BANDS)
@pytest.mark.parametrize(("s_q", "s_kv"), [(4, 4), (3, 6), (6, 3)])
def test_output_band_equals_loops(mask, window, bottom_right, expected, s_q, s_kv):
    left, right, aligned = expected
    q, k, v = operands(1, 2, 1, s_q, s_kv, 3, 2)
    out, aux = attention(
        q, k, v, layout="bhsd", mask=mask, window=window, bottom_right=bottom_right
    )
    seen = in_band(left, right, s_kv - s_q if aligned else 0)
    want, lse, _ = loops(q, k, v, seen=seen, score=lambda dot, *_: dot / math.sqrt(3))
    close(out, want)
    close(aux.lse, lse)


def test_scores_every_term_together_equals_loops():
    q, k, v = operands(2, 4, 2, 4, 6, 3, 5)
    bias = torch.randn(2, 1, 4, 6, dtype=torch.float64)
    slopes = torch.rand(2, 4)
    allowed = torch.rand(1, 4, 4, 6) > 0.3
    sink = torch.randn(4)
    state = torch.tensor([11, 22])

    def score(dot, b, h, i, j):
        x = 1.5 * math.tanh(dot * 0.7 / 1.5)
        x = x * (1 + 0.125 * b) - 0.25 * h * (i - j)
        x += bias[b, 0, i, j].item()
        return x - slopes[b, h].item() * abs(i + 2 - j)

    # Index tensors are integers, so their products are float32: the factors are exact in it.
    def score_mod(x, b, h, i, j):
        return x * (1 + 0.125 * b) - 0.25 * h * (i - j)

    out, aux = attention(
        q,
        k,
        v,
        layout="bhsd",
        mask="causal_bottom_right",
        attn_mask=allowed,
        softmax_scale=0.7,
        softcap=1.5,
        score_mod=score_mod,
        mask_mod=lambda b, h, i, j: (i + j + h) % 3 != b,
        bias=bias,
        alibi_slopes=slopes,
        softmax="learnable",
        sink=sink,
        dropout_p=0.3,
        rng_state=state,
        return_max_logit=True,
    )

    def seen(b, h, i, j):
        return j <= i + 2 and allowed[0, h, i, j].item() and (i + j + h) % 3 != b

    keep = dropout_keep_mask(state, 0.3, 2, 4, 4, 6)
    factor = 1 / (1 - round(0.3 * 256) / 256)
    want, lse, largest = loops(
        q, k, v, seen=seen, score=score, sink=sink.tolist(), keep=keep, keep_factor=factor
    )
    close(out, want)
    close(aux.lse, lse)
    close(aux.max_logit, largest)


def test_bias_pre_scale_is_added_before_scale_and_softcap():
    q, k, v = operands(1, 2, 2, 3, 4, 3, 3)
    bias = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    out, _ = attention(
        q, k, v, layout="bhsd", bias=bias, bias_type="pre_scale", softmax_scale=0.4, softcap=0.9
    )

    def score(dot, b, h, i, j):
        return 0.9 * math.tanh((dot + bias[0, h, i, j].item()) * 0.4 / 0.9)

    close(out, loops(q, k, v, seen=lambda *_: True, score=score)[0])


@pytest.mark.parametrize(
    "shape", [(2, 4, 3, 5), (1, 4, 3, 5), (2, 1, 3, 5), (1, 1, 3, 5), (1, 1, 1, 5), (3, 5)]
)
@pytest.mark.parametrize("bias_type", ["post_scale", "pre_scale"])
def test_bias_broadcast_equals_expanded(shape, bias_type):
    q, k, v = operands(2, 4, 4, 3, 5, 3, 3)
    bias = torch.randn(shape, dtype=torch.float64)
    out, _ = attention(q, k, v, layout="bhsd", bias=bias, bias_type=bias_type)
    full, _ = attention(q, k, v, layout="bhsd", bias=bias.expand(2, 4, 3, 5), bias_type=bias_type)
    none, _ = attention(q, k, v, layout="bhsd")
    close(out, full)
    assert not torch.allclose(out, none)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_alibi_by_name_or_flag_equals_default_slopes(mask):
    q, k, v = operands(1, 6, 2, 4, 5, 3, 3)
    slopes = default_alibi_slopes(6)
    want, _, _ = loops(
        q,
        k,
        v,
        seen=lambda b, h, i, j: mask == "none" or j <= i,
        score=lambda dot, b, h, i, j: dot / math.sqrt(3) - slopes[h].item() * abs(i - j),
    )
    for asked in ({"alibi_slopes": True}, {"bias_type": "alibi"}, {"alibi_slopes": slopes}):
        close(attention(q, k, v, layout="bhsd", mask=mask, **asked)[0], want)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2.0**-k for k in range(1, 9)]),
    ],
)
def test_default_alibi_slopes_follow_the_formula(heads, expected):
    slopes = default_alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == expected


def test_softmax_off_by_one_equals_zero_sink_and_loops():
    q, k, v = operands(2, 2, 2, 3, 4, 3, 3)
    out, aux = attention(q, k, v, layout="bhsd", softmax="off_by_one")
    zero, zero_aux = attention(q, k, v, layout="bhsd", softmax="learnable", sink=torch.zeros(2))
    want, lse, _ = loops(
        q, k, v, seen=lambda *_: True, score=lambda dot, *_: dot / math.sqrt(3), sink=[0.0, 0.0]
    )
    close(out, want)
    close(aux.lse, lse)
    assert torch.equal(out, zero)
    assert torch.equal(aux.lse, zero_aux.lse)


def header_of(reference=""):
    """A score that the argument `sink` asks for, with a definition or without."""
    head = 'name = "mine"\ndoc = "Mine."\nstruct = "Mine"\nselected_by = "alibi"\norder = 150\n'
    operand = '[[operand]]\nname = "sink"\ndomain = "head"\ndtype = "f32"\ndoc = "A factor."\n'
    return parse_header(f"<#\n{head}{reference}{operand}#>", Path("score/mine.cuh.j2"), "score")


def test_score_of_an_argument_is_what_its_header_defines():
    q, k, v = operands(1, 2, 2, 3, 4, 8, 8)
    s, factor = q[0] @ k[0].transpose(1, 2), torch.tensor([2.0, 3.0], dtype=torch.float64)
    defined = header_of('reference = "score * sink"\n')
    without, given = AttentionCall(q=q, k=k, v=v), AttentionCall(q=q, k=k, v=v, sink=factor)
    assert torch.equal(switched_scores(without, 0, s, defined, None), s)
    assert torch.equal(switched_scores(given, 0, s, defined, None), s * factor[:, None, None])
    with pytest.raises(SpecError, match="no definition for the reference"):
        switched_scores(given, 0, s, header_of(), None)
