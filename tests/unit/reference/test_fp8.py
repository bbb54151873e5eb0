"""The FP8 emulation: its rounding against the table of all codes, its attention against loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attngen.reference import attention, fp8, fp8_forward

E4M3, E5M2 = fp8.DTYPES
WEIGHTS = 2**-4  # largest relative error of a weight in e4m3, and so of sums of one sign
HALF = (torch.float16, torch.bfloat16)


def codes(dtype: torch.dtype) -> list[float]:
    """Every finite number of an 8-bit format that is not negative, by its code."""
    bits, bias = (3, 7) if dtype == E4M3 else (2, 15)
    numbers = []
    for code in range(128):
        exponent, mantissa = code >> bits, code & (1 << bits) - 1
        if exponent:
            numbers.append((1 + mantissa / (1 << bits)) * 2.0 ** (exponent - bias))
        else:
            numbers.append(mantissa / (1 << bits) * 2.0 ** (1 - bias))
    # e4m3 keeps its last code for NaN; e5m2 its last exponent for infinity and NaN.
    return numbers[:-1] if dtype == E4M3 else numbers[:-4]


def rounded(x: float, dtype: torch.dtype) -> float:
    """The nearest number of the format, the even code of two as near; saturated."""
    if math.isnan(x):
        return x
    table = codes(dtype)
    code = min(range(len(table)), key=lambda n: (abs(table[n] - abs(x)), n % 2))
    return math.copysign(table[code], x)


def operands(b=1, h_q=2, h_kv=1, s_q=5, s_kv=7, d=16, d_v=16, kv=E4M3, q=E4M3, seed=0, factor=1.0):
    """Random Q, K and V in bhsd, and what they stand for in float64."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((b, h_q, s_q, d), (b, h_kv, s_kv, d), (b, h_kv, s_kv, d_v))
    tensors = [
        (torch.randn(shape, generator=make) * factor).to(dtype)
        for shape, dtype in zip(shapes, (q, kv, kv), strict=True)
    ]
    return tensors, [x.double() for x in tensors]


def loops(q, k, v, *, scale_s, descale_s, seen=lambda i, j: True):
    """O in float64 by plain Python, of dequantised float64 operands in bhsd."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        products = (k[b, h // group] @ q[b, h, i] / math.sqrt(q.shape[-1])).tolist()
        row = {j: x for j, x in enumerate(products) if seen(i, j)}
        top = max(row.values(), default=0.0)
        total = sum(math.exp(x - top) for x in row.values())
        for j, x in row.items():
            weight = rounded(math.exp(x - top) * scale_s, E4M3) * descale_s
            out[b, h, i] += weight / total * v[b, h // group, j]
    return out


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantise_numbers_and_midpoints_round_to_nearest_even(dtype):
    table = codes(dtype)
    assert max(table) == torch.finfo(dtype).max
    middles = [(a + b) / 2 for a, b in itertools.pairwise(table)]
    beside = [x * (1 + sign * 2e-7) for x in middles for sign in (-1, 1)]
    numbers = [sign * x for x in (*table, *middles, *beside) for sign in (-1, 1)]
    found = fp8.quantise(torch.tensor(numbers, dtype=torch.float32), dtype).float().tolist()
    assert found == [rounded(x, dtype) for x in numbers]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantise_what_is_too_large_saturates_and_nan_stays(dtype):
    x = torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan, 1.01 * torch.finfo(dtype).max])
    largest = torch.finfo(dtype).max
    found = fp8.quantise(x, dtype).float()
    assert found[4].isnan()
    assert found[[0, 1, 2, 3, 5]].tolist() == [largest, -largest, largest, -largest, largest]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantise_scales_before_it_saturates(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([4 * largest, largest / 4])
    assert fp8.quantise(x, dtype, torch.tensor([0.25])).float().tolist() == [largest, largest / 16]
    assert fp8.quantise(x, dtype, 8.0).float().tolist() == [largest, largest]


@pytest.mark.parametrize("q", [E4M3, E5M2])
@pytest.mark.parametrize("kv", [E4M3, E5M2])
@pytest.mark.parametrize("causal", [False, True])
def test_output_equals_loops_with_rounded_weights(q, kv, causal):
    tensors, exact = operands(q=q, kv=kv, h_q=4, h_kv=2)
    out, _ = attention(*tensors, layout="bhsd", mask="causal" if causal else "none")
    assert out.dtype == torch.bfloat16
    seen = (lambda i, j: j <= i) if causal else (lambda i, j: True)
    want = loops(*exact, scale_s=256.0, descale_s=1 / 256, seen=seen)
    close(out, want, 2**-8)
    unrounded, _ = attention(*exact, layout="bhsd", mask="causal" if causal else "none")
    assert (unrounded - want).abs().max() > 2**-7, "too close to tell"


@pytest.mark.parametrize("scale_s", [1.0, 100.0, 448.0, 3000.0])
def test_output_with_scale_of_weights_equals_loops(scale_s):
    tensors, exact = operands(s_kv=40)
    scale, descale = torch.tensor([scale_s]), torch.tensor([1 / scale_s])
    out, aux = attention(
        *tensors, layout="bhsd", scale_s=scale, descale_s=descale, out_dtype=torch.float16
    )
    close(out, loops(*exact, scale_s=scale_s, descale_s=1 / scale_s), 2**-10)
    plain, plain_aux = attention(*tensors, layout="bhsd", out_dtype=torch.float16)
    assert torch.equal(aux.lse, plain_aux.lse), "the LSE is of what is not quantised"
    assert not torch.equal(out, plain)


def test_output_weights_that_saturate_are_cut_and_no_nan_appears():
    tensors, _ = operands(s_kv=1)
    scale = torch.tensor([1000.0])
    out, _ = attention(*tensors, layout="bhsd", scale_s=scale, descale_s=1 / scale)
    close(out, 0.448 * tensors[2].double().expand_as(out), 2**-8)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_output_in_fp8_is_scaled_saturated_and_rounded_once(dtype):
    tensors, _ = operands()
    exact, _ = attention(*tensors, layout="bhsd", out_dtype=torch.float16)
    scale = torch.tensor([torch.finfo(dtype).max])  # so that what is above 1 saturates
    out, aux = attention(*tensors, layout="bhsd", out_dtype=dtype, scale_o=scale, return_amax=True)
    assert out.dtype == dtype and aux.amax_o.item() > 1
    largest = torch.finfo(dtype).max
    assert out.float().abs().max() == largest and not out.float().isnan().any()
    step = 2.0 ** -(3 if dtype == E4M3 else 2)
    want = (exact.float() * scale).clamp(-largest, largest)
    assert ((out.float() - want).abs() <= step * want.abs() + 1).all()


@pytest.mark.parametrize("dtype", [*HALF, E4M3, E5M2])
def test_output_dtype_without_scale_is_the_plain_rounding(dtype):
    tensors, exact = operands()
    out, _ = attention(*tensors, layout="bhsd", out_dtype=dtype)
    want = loops(*exact, scale_s=256.0, descale_s=1 / 256)
    assert out.dtype == dtype
    close(out.float(), want, torch.finfo(dtype).eps)


def test_descales_per_head_equal_operands_scaled_before():
    tensors, exact = operands(b=3, h_q=6, h_kv=2)
    descales = [2.0 ** torch.randint(-3, 3, (3, 2)).float() for _ in range(3)]
    out, aux = attention(
        *tensors,
        layout="bhsd",
        descale_q=descales[0],
        descale_k=descales[1],
        descale_v=descales[2],
        out_dtype=torch.float16,
    )
    for heads, x, descale in zip((3, 1, 1), exact, descales, strict=True):
        x *= descale.double().repeat_interleave(heads, dim=1)[:, :, None, None]
    want, want_aux = attention(*exact, layout="bhsd")
    close(aux.lse, want_aux.lse, 1e-5)
    close(out, loops(*exact, scale_s=256.0, descale_s=1 / 256), 2**-9)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_descale_of_one_number_equals_it_for_every_head(name):
    tensors, _ = operands(b=2, h_q=4, h_kv=2)
    one, all_heads = torch.tensor([0.3]), torch.full((2, 2), 0.3)
    calls = [
        attention(*tensors, layout="bhsd", **{f"descale_{name}": descale})
        for descale in (one, all_heads)
    ]
    assert torch.equal(calls[0][0], calls[1][0])
    assert torch.equal(calls[0][1].lse, calls[1][1].lse)
    assert not torch.equal(calls[0][0], attention(*tensors, layout="bhsd")[0])


def test_lse_is_that_of_the_dequantised_operands():
    tensors, exact = operands(b=2, h_q=4, h_kv=2, s_q=33, s_kv=65, d=64)
    _, aux = attention(*tensors, layout="bhsd", mask="causal_bottom_right")
    _, want = attention(*exact, layout="bhsd", mask="causal_bottom_right")
    assert aux.lse.dtype == torch.float32
    close(aux.lse, want.lse, 1e-6)


def test_maxima_are_of_the_weights_and_of_the_unscaled_output():
    tensors, exact = operands(b=2, h_q=4, h_kv=2)
    _, aux = attention(
        *tensors, layout="bhsd", out_dtype=E4M3, scale_o=torch.tensor([8.0]), return_amax=True
    )
    want = loops(*exact, scale_s=256.0, descale_s=1 / 256)
    assert aux.amax_s.shape == aux.amax_o.shape == (1,)
    assert aux.amax_s.dtype == aux.amax_o.dtype == torch.float32
    assert aux.amax_s.item() == 1
    close(aux.amax_o[0], want.abs().max(), 1e-5)
    assert attention(*tensors, layout="bhsd")[1].amax_s is None


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5)], ids=str)
def test_nothing_to_see_is_zero_with_maxima_zero(sizes):
    b, s_q, s_kv = sizes
    tensors, _ = operands(b=b, s_q=s_q, s_kv=s_kv)
    out, aux = attention(*tensors, layout="bhsd", out_dtype=E4M3, return_amax=True)
    assert out.shape == (b, 2, s_q, 16) and not out.float().any()
    assert (aux.lse == -math.inf).all()
    assert aux.amax_s.tolist() == aux.amax_o.tolist() == [0.0]


def test_rows_that_see_nothing_are_zero_beside_rows_that_do():
    tensors, _ = operands(s_q=7, s_kv=3)
    out, aux = attention(*tensors, layout="bhsd", mask="causal_bottom_right", return_amax=True)
    assert not out[:, :, :4].any() and out[:, :, 4:].any()
    assert (aux.lse[:, :, :4] == -math.inf).all() and aux.lse[:, :, 4:].isfinite().all()
    assert aux.amax_s.item() == 1


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_forward_in_float64_is_that_of_loops_and_is_not_stored(mask):
    tensors, exact = operands(h_q=4, h_kv=2)
    seen = (lambda i, j: j <= i) if mask == "causal" else (lambda i, j: True)
    out, aux = fp8_forward(*tensors, layout="bhsd", mask=mask)
    want = loops(*exact, scale_s=256.0, descale_s=1 / 256, seen=seen)
    assert out.dtype == aux.lse.dtype == torch.float64
    close(out, want, 1e-13)
    close(aux.lse, attention(*exact, layout="bhsd", mask=mask)[1].lse, 1e-13)
    single, _ = fp8_forward(*tensors, layout="bhsd", mask=mask, accumulate=torch.float32)
    stored, _ = attention(*tensors, layout="bhsd", mask=mask)
    assert single.dtype == torch.float32 and torch.equal(single.bfloat16(), stored)


def test_large_operands_give_no_nan():
    for dtype in (E4M3, E5M2):
        tensors, _ = operands(q=dtype, kv=dtype)
        tensors = [(x.float().sign() * torch.finfo(dtype).max).to(dtype) for x in tensors]
        for out_dtype in (None, E4M3, E5M2):
            out, aux = attention(*tensors, layout="bhsd", out_dtype=out_dtype)
            assert out.float().isfinite().all() and aux.lse.isfinite().all()


@pytest.mark.parametrize("softmax", ["off_by_one", "learnable"])
def test_sink_is_in_the_sum_and_not_in_the_maximum(softmax):
    """A sink far above every score leaves weights to round that would be 0 beside it."""
    tensors, exact = operands()
    sink = torch.tensor([3.0, 200.0]) if softmax == "learnable" else None
    arguments = {"layout": "bhsd", "softmax": softmax, "sink": sink}
    out, aux = attention(*tensors, **arguments, return_amax=True)
    want, want_aux = attention(*exact, **arguments)
    close(aux.lse, want_aux.lse, 1e-6)
    assert (out.double() - want).abs().max() <= WEIGHTS * want.abs().max()
    assert aux.amax_s.item() == 1


def test_dropout_and_alibi_follow_the_definition():
    tensors, exact = operands(b=2, s_q=20, s_kv=24)
    state = torch.tensor([5, 7])
    arguments = {"layout": "bhsd", "alibi_slopes": True, "dropout_p": 0.25, "rng_state": state}
    out, _ = attention(*tensors, **arguments)
    want, _ = attention(*exact, **arguments)
    assert (out.double() - want).abs().max() <= WEIGHTS * want.abs().max()


@pytest.mark.parametrize("layout", ["bs3hd", "thd", "paged_kv_bshd_bshd_bshd", "sbhd"])
def test_layouts_equal_dense_operands(layout):
    tensors, _ = operands(b=2, h_q=2, h_kv=2, s_q=6, s_kv=6)
    descale = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    want, _ = attention(*tensors, layout="bhsd", descale_v=descale)
    want = want.transpose(1, 2)  # bshd
    q, k, v = (x.transpose(1, 2) for x in tensors)
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    if layout == "bs3hd":
        arguments = {"q": torch.stack([x.float() for x in (q, k, v)], 2).to(E4M3)}
    elif layout == "thd":
        arguments = {n: x.flatten(0, 1) for n, x in zip("qkv", (q, k, v), strict=True)}
        arguments |= {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    elif layout == "sbhd":
        arguments = {n: x.transpose(0, 1) for n, x in zip("qkv", (q, k, v), strict=True)}
    else:
        pages = [x.reshape(4, 3, 2, 16)[[1, 0, 3, 2]] for x in (k, v)]
        lengths = torch.tensor([6, 6], dtype=torch.int32)
        arguments = {"q": q, "k": pages[0], "v": pages[1]}
        arguments |= {"page_table": table, "seqused_kv": lengths}
    out, _ = attention(**arguments, layout=layout, descale_v=descale)
    if layout == "sbhd":
        out = out.transpose(0, 1)
    assert torch.equal(out.reshape(want.shape), want)
