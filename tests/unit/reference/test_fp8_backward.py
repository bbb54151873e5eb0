"""FP8's backward: without rounding it is autograd's, with it an oracle's that is written apart."""

from __future__ import annotations

import math

import pytest
import torch

from attngen.errors import SpecError
from attngen.reference import BackwardOperands, attention, dropout_keep_mask, fp8, fp8_backward
from attngen.reference.fp8_backward import chosen_scale_s, power_of_two

E4M3, E5M2 = fp8.DTYPES
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
STATE = torch.tensor([3, 14])
CU_Q = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
CU_KV = torch.tensor([0, 7, 8, 17], dtype=torch.int32)
STARTS_Q = torch.tensor([1, 7, 9, 18], dtype=torch.int32)
STARTS_KV = torch.tensor([0, 8, 10, 20], dtype=torch.int32)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(*shapes, dtype=E4M3):
    """Tensors in 8 bits."""
    return [randn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]


VARIANTS = {
    "plain": {},
    "causal": {"mask": "causal"},
    "bottom_right": {"mask": "causal_bottom_right"},
    "window": {"window": (2, 1), "bottom_right": True},
    "attn_mask": {"attn_mask": randn(2, 1, 6, 7, seed=9) > 0},
    "softcap": {"softcap": 0.8, "softmax_scale": 0.7},
    "alibi": {"alibi_slopes": True, "mask": "causal_bottom_right"},
    "dropout": {"dropout_p": 0.4, "rng_state": STATE},
    "off_by_one": {"softmax": "off_by_one", "mask": "causal"},
    "learnable": {
        "softmax": "learnable",
        "sink": torch.tensor([0.25, -1.25, 0.5, 2.0], dtype=torch.float64),
        "dropout_p": 0.2,
        "rng_state": STATE,
    },
    "bias": {"bias": randn(1, 4, 6, 7, seed=7), "mask": "causal", "softcap": 2.0},
    "bias_broadcast": {"bias": randn(2, 1, 1, 7, seed=7)},
    "pre_scale": {"bias": randn(1, 1, 6, 7, seed=7), "bias_type": "pre_scale"},
    "padding": {
        "mask": "padding_causal",
        "seqused_q": torch.tensor([4, 6]).int(),
        "seqused_kv": torch.tensor([7, 0]).int(),
    },
    "no_weight": {
        "softmax": "learnable",
        "sink": torch.tensor([-math.inf, -1.25, 0.5, -math.inf], dtype=torch.float64),
        "seqused_kv": torch.tensor([7, 0]).int(),
    },
}


def exact_gradients(tensors, d_o, d_lse, arguments):
    """Autograd's, in float64, of the numbers that the operands stand for, and the forward's O and
    LSE."""
    leaves = [x.double().requires_grad_() for x in tensors]
    learned = {
        name: x.clone().requires_grad_()
        for name, x in arguments.items()
        if name in ("bias", "sink")
    }
    out, aux = attention(*leaves, **{**arguments, **learned})
    gradients = torch.autograd.grad((out, aux.lse), (*leaves, *learned.values()), (d_o, d_lse))
    found = dict(zip(("dq", "dk", "dv")[: len(leaves)], gradients, strict=False))
    learned_names = [f"d{name}" for name in learned]
    found |= dict(zip(learned_names, gradients[len(leaves) :], strict=True))
    return found, out.detach(), aux.lse.detach()


def compare(tensors, d_o, d_lse, arguments):
    want, out, lse = exact_gradients(tensors, d_o, d_lse, arguments)
    given = BackwardOperands(d_o=d_o, o=out, lse=lse, dlse=d_lse, dtype=torch.float64)
    found = fp8_backward(given, *tensors, accumulate=torch.float64, **arguments)
    for name, x in want.items():
        torch.testing.assert_close(found.by_name[name], x, rtol=1e-9, atol=1e-9)
    return found, want


@pytest.mark.parametrize("variant", VARIANTS)
def test_wide_gradient_of_the_output_gives_autograds_gradients(variant):
    tensors = operands((2, 6, 4, 16), (2, 7, 2, 16), (2, 7, 2, 32))
    d_o, d_lse = randn(2, 6, 4, 32, seed=5), randn(2, 4, 6, seed=6)
    found, want = compare(tensors, d_o, d_lse, VARIANTS[variant])
    assert all(x.any() for x in want.values())
    assert found.amax_dv.item() == pytest.approx(want["dv"].abs().max().item(), rel=1e-6)
    assert ("dbias" not in found.learned) == ("bias" not in VARIANTS[variant])


@pytest.mark.parametrize("gaps", [False, True])
def test_packed_sequences_and_their_gaps_give_autograds_gradients(gaps):
    starts = {"cu_seqlens_q_padded": STARTS_Q, "cu_seqlens_kv_padded": STARTS_KV}
    arguments = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV} | (starts if gaps else {})
    arguments |= {"layout": "thd", "mask": "causal_bottom_right"}
    tensors = operands((20, 4, 16), (22, 2, 16), (22, 2, 16))
    found, _ = compare(tensors, randn(20, 4, 16, seed=5), randn(4, 20, seed=6), arguments)
    if gaps:
        assert not found.dq[0].any() and not found.dk[7].any() and found.dq[1:6].any()


@pytest.mark.parametrize("layout", ["bs3hd", "sbh3d", "bshd_bs2hd", "bhsd", "sbhd_bshd_bshd"])
def test_layouts_give_autograds_gradients_packed_as_the_operands_are(layout):
    shapes = {
        "bs3hd": [(2, 5, 3, 2, 16)],
        "sbh3d": [(5, 2, 2, 3, 16)],
        "bshd_bs2hd": [(2, 5, 4, 16), (2, 5, 2, 2, 16)],
        "bhsd": [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)],
        "sbhd_bshd_bshd": [(5, 2, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16)],
    }[layout]
    tensors = operands(*shapes)
    with torch.no_grad():
        out, aux = attention(*[x.double() for x in tensors], layout=layout)
    d_o, d_lse = randn(*out.shape, seed=5), randn(*aux.lse.shape, seed=6)
    compare(tensors, d_o, d_lse, {"layout": layout, "mask": "causal"})


def stored(x, dtype, scale, descale=None):
    """Numbers as 8 bits hold them, written apart from the reference."""
    limit = LARGEST[dtype]
    read = torch.clamp(x * scale, -limit, limit).to(dtype).to(x.dtype)
    return read / scale if descale is None else read * descale


def oracle(x, scales, keep, q_dtype, do_dtype, sm_scale):
    """dQ, dK, dV and max |dS| of dequantised [h, s, d] operands with as many heads, all causal, in
    their dtype: each step as docs/guide/semantics.md has it."""
    q, k, v, d_o, o, lse = x
    seen = torch.ones(q.shape[1], k.shape[1]).tril().bool()
    p = torch.where(seen, torch.exp(q @ k.mT * sm_scale - lse[..., None]), 0.0)
    d = (d_o * o).sum(-1, keepdim=True)
    p8 = stored(p * keep, q_dtype, *scales["s"])
    d_s = p * (keep * (d_o @ v.mT) - d) * sm_scale
    ds8 = stored(d_s, do_dtype, *scales["dp"])
    return ds8 @ k, ds8.mT @ q, p8.mT @ d_o, d_s.abs().max()


@pytest.mark.parametrize("q_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("do_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_stored_numbers_are_those_of_the_definition(q_dtype, do_dtype, dropout_p):
    h, s, d = 3, 40, 32
    q, k, v = operands((1, h, s, d), (1, h, s, d), (1, h, s, d), dtype=q_dtype)
    d_o = randn(1, h, s, d, seed=4).to(do_dtype)
    descales = {"descale_q": 0.5, "descale_k": 0.3, "descale_v": 2.0}
    descales = {name: torch.tensor([x]).double() for name, x in descales.items()}
    arguments = {"layout": "bhsd", "mask": "causal", "dropout_p": dropout_p, **descales}
    arguments["rng_state"] = STATE if dropout_p else None
    plain = {name: x for name, x in arguments.items() if name not in descales}
    exact = [x.double() * y for x, y in zip((q, k, v), descales.values(), strict=True)]
    out, aux = attention(*exact, **plain)
    one = torch.ones(1, dtype=torch.float64)
    # P saturates at 448 in short rows, dS in none; neither scale is a power of two.
    numbers = {"s": (700.0, 1 / 700), "dp": (90.0, 1 / 90)}  # as float32 has them
    scales = {name: [torch.tensor([x]).double() for x in pair] for name, pair in numbers.items()}
    given = BackwardOperands(
        d_o=d_o, o=(out * 8).to(E4M3), descale_o=one / 8, lse=aux.lse, descale_do=one * 0.75,
        scale_dp=scales["dp"][0], descale_dp=scales["dp"][1], dtype=torch.float64,
    )  # fmt: skip
    arguments |= {"scale_s": scales["s"][0], "descale_s": scales["s"][1]}
    found = fp8_backward(given, q, k, v, accumulate=torch.float64, **arguments)
    keep = torch.ones(1, h, s, s, dtype=torch.float64)
    if dropout_p:
        keep = dropout_keep_mask(STATE, dropout_p, 1, h, s, s).double() / (1 - dropout_p)
    o8 = (out * 8).to(E4M3).double() / 8
    x = [t[0] for t in (*exact, d_o.double() * 0.75, o8, aux.lse)]
    *want, amax = oracle(x, scales, keep[0], q_dtype, do_dtype, d**-0.5)
    for name, each in zip(("dq", "dk", "dv"), want, strict=True):
        torch.testing.assert_close(getattr(found, name)[0], each, rtol=1e-9, atol=1e-12)
    assert found.amax_dp.item() == pytest.approx(amax.item(), rel=1e-6)
    loose = BackwardOperands(d_o=d_o.double() * 0.75, o=o8, lse=aux.lse, dtype=torch.float64)
    unrounded = fp8_backward(loose, q, k, v, accumulate=torch.float64, **arguments)
    for name in ("dq", "dk", "dv"):
        assert (getattr(unrounded, name) - getattr(found, name)).abs().max() > 1e-4, name


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_gradients_in_8_bits_are_scaled_saturated_and_summed_over_groups_before(dtype):
    q, k, v = operands((1, 6, 4, 16), (1, 7, 1, 16), (1, 7, 1, 16))
    out, aux = attention(q.double(), k.double(), v.double())
    d_o = randn(1, 6, 4, 16, seed=4)
    scales = {"scale_dq": 4.0, "scale_dk": LARGEST[dtype], "scale_dv": 3.0}
    scales = {name: torch.tensor([x]) for name, x in scales.items()}
    common = {"d_o": d_o, "o": out, "lse": aux.lse}
    wide = fp8_backward(BackwardOperands(**common, dtype=torch.float32), q, k, v)
    found = fp8_backward(BackwardOperands(**common, **scales, dtype=dtype), q, k, v)
    for name in ("dq", "dk", "dv"):
        want = fp8.quantise(getattr(wide, name), dtype, scales[f"scale_{name}"])
        assert torch.equal(getattr(found, name).view(torch.uint8), want.view(torch.uint8)), name
        amax = getattr(found, f"amax_{name}")
        assert amax.shape == (1,) and amax.dtype == torch.float32
        assert amax.item() == getattr(wide, name).abs().max().item(), "it is of what is not scaled"
    assert found.dk.float().abs().max() == LARGEST[dtype] and wide.dk.abs().max() > 1


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_chosen_scale_of_weights_is_the_largest_power_of_two_that_cuts_none(dtype):
    for p in (0.0, 0.1, 0.43, 0.5, 0.9, 1.0):
        kept = 256 / (256 - round(p * 256)) if p < 1 else 1.0
        scale = chosen_scale_s(dtype, p)
        assert math.frexp(scale)[0] == 0.5 and scale * kept <= LARGEST[dtype] < 2 * scale * kept
    assert chosen_scale_s(E4M3, 0.0) == fp8.DEFAULT_SCALE_S


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
def test_chosen_scale_of_ds_fits_whatever_the_magnitude(dtype, factor):
    """Neither saturates nor loses: as exact as with the scale of the true maximum, nearly."""
    q, k, v = operands((1, 64, 4, 32), (1, 64, 2, 32), (1, 64, 2, 32))
    out, aux = attention(q.double(), k.double(), v.double())
    d_o, descale = randn(1, 64, 4, 32, seed=4).to(dtype), torch.tensor([factor], dtype=torch.double)
    common = {"d_o": d_o, "descale_do": descale, "o": out, "lse": aux.lse, "dtype": torch.float64}
    exact = {**common, "d_o": d_o.double() * factor, "descale_do": None}
    want = fp8_backward(BackwardOperands(**exact), q, k, v, accumulate=torch.float64)
    largest = torch.tensor([LARGEST[dtype]], dtype=torch.double) / want.amax_dp
    own = BackwardOperands(**common, scale_dp=largest, descale_dp=1 / largest)
    errors = [
        [
            (
                (getattr(found, name) - getattr(want, name)).norm() / getattr(want, name).norm()
            ).item()
            for name in ("dq", "dk")
        ]
        for given in (BackwardOperands(**common), own)
        for found in [fp8_backward(given, q, k, v, accumulate=torch.float64)]
    ]
    chosen, best = errors
    assert all(0 < a <= 1.2 * b < 0.2 for a, b in zip(chosen, best, strict=True)), errors


def test_power_of_two_is_at_most_the_number_and_1_for_what_is_none():
    numbers = torch.tensor([1.0, 1.5, 0.75, 448.0, 3e38, 1e-40, 0.0, -1.0, math.inf, math.nan])
    want = [1.0, 1.0, 0.5, 256.0, 2.0**126, 2.0**-126, 1.0, 1.0, 1.0, 1.0]
    assert power_of_two(numbers).tolist() == want


@pytest.mark.parametrize("scale", [0.0, 1e-45, 3e38])
def test_extreme_scales_give_finite_results(scale):
    q, k, v = operands((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    out, aux = attention(q.double(), k.double(), v.double())
    one, extreme = torch.ones(1), torch.tensor([scale])
    given = BackwardOperands(
        d_o=randn(1, 9, 2, 16, seed=4).to(E5M2), o=out.half(), lse=aux.lse.float(),
        scale_dp=extreme, descale_dp=one, scale_dq=extreme, scale_dk=extreme, dtype=E5M2,
    )  # fmt: skip
    found = fp8_backward(given, q, k, v, scale_s=extreme, descale_s=one)
    assert all(x.float().isfinite().all() for x in (found.dq, found.dk, found.dv, found.amax_dp))


def test_autocast_changes_nothing():
    q, k, v = operands((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    out, aux = attention(q, k, v)
    given = BackwardOperands(d_o=randn(1, 9, 2, 16, seed=4).to(E5M2), o=out, lse=aux.lse)
    want = fp8_backward(given, q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        found = fp8_backward(given, q, k, v)
    assert all(torch.equal(getattr(found, n), getattr(want, n)) for n in ("dq", "dk", "dv"))
    assert torch.equal(found.amax_dp, want.amax_dp)


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_nothing_to_see_has_gradients_and_maxima_zero(sizes):
    b, s_q, s_kv = sizes
    q, k, v = operands((b, s_q, 2, 16), (b, s_kv, 2, 16), (b, s_kv, 2, 16))
    out, aux = attention(q, k, v)
    given = BackwardOperands(d_o=torch.ones(b, s_q, 2, 16).to(E5M2), o=out, lse=aux.lse, dtype=E5M2)
    found = fp8_backward(given, q, k, v)
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        assert getattr(found, name).shape == x.shape and not getattr(found, name).float().any()
        assert getattr(found, f"amax_{name}").tolist() == [0.0]
    assert found.amax_dp.tolist() == [0.0]


def test_rows_that_see_nothing_have_no_gradient_and_no_nan():
    q, k, v = operands((1, 7, 2, 16), (1, 3, 2, 16), (1, 3, 2, 16))
    out, aux = attention(q, k, v, mask="causal_bottom_right")
    d_o = randn(1, 7, 2, 16, seed=4).to(E5M2)
    given = BackwardOperands(d_o=d_o, o=out, lse=aux.lse)
    found = fp8_backward(given, q, k, v, mask="causal_bottom_right")
    assert not found.dq[:, :4].any() and found.dq[:, 4:].any() and found.dk.any()
    assert all(x.isfinite().all() for x in (found.dq, found.dk, found.dv))


X = torch.zeros(1, 4, 2, 16)
ONE = torch.ones(1)
CALL = {"q": X.to(E4M3), "k": X.to(E4M3), "v": X.to(E4M3)}
GIVEN = {"d_o": X.to(E5M2), "o": X.to(E4M3), "lse": torch.zeros(1, 2, 4)}
REFUSED = {
    "q_16_bit": ({"q": X.half(), "k": X.half(), "v": X.half()}, {}, ["q needs an FP8 dtype"]),
    "d_o_shape": ({}, {"d_o": X[:, :3].to(E5M2)}, ["d_o needs", "[1, 3, 2, 16]"]),
    "o_dtype": ({}, {"o": X.int()}, ["o needs FP8 or floats", "int32"]),
    "lse_shape": ({}, {"lse": torch.zeros(1, 4, 2)}, ["lse needs float32 [1, 2, 4]"]),
    "lse_dtype": ({}, {"lse": torch.zeros(1, 2, 4).half()}, ["lse needs float32"]),
    "dlse_shape": ({}, {"dlse": ONE}, ["dlse needs float32 [1, 2, 4]"]),
    "scale_number": ({}, {"descale_do": 1.0}, ["descale_do needs float32 [1]; got 1.0"]),
    "scale_shape": ({}, {"descale_o": torch.ones(2)}, ["descale_o needs float32 [1]", "[2]"]),
    "scale_dtype": ({}, {"scale_dq": ONE.int(), "dtype": E5M2}, ["scale_dq needs", "int32"]),
    "scale_device": ({}, {"descale_do": ONE.to("meta")}, ["descale_do needs q's device"]),
    "scale_dp_alone": ({}, {"scale_dp": ONE}, ["belong together", "scale_dp alone"]),
    "descale_dp_alone": ({}, {"descale_dp": ONE}, ["belong together", "descale_dp alone"]),
    "scale_of_16_bits": ({}, {"scale_dk": ONE}, ["scale_dk belongs to FP8 gradients", "bfloat16"]),
    "descale_wide_o": ({}, {"o": X.half(), "descale_o": ONE}, ["descale_o belongs to FP8 o"]),
    "descale_wide_do": ({}, {"d_o": X, "descale_do": ONE}, ["descale_do belongs to FP8 d_o"]),
    "dtype": ({}, {"dtype": torch.int8}, ["gradients need one of", "torch.int8"]),
    "no_state": ({"dropout_p": 0.5}, {}, ["dropout needs the rng_state"]),
    "function": ({"mask_mod": lambda b, h, i, j: i >= j}, {}, ["mask_mod", "no FP8 backward"]),
    "pages": (
        {
            "layout": "paged_kv_bshd_bshd_bshd",
            "page_table": torch.zeros(1, 1).int(),
            "seqused_kv": torch.ones(1).int(),
        },
        {},
        ["inference only"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inconsistent_backward_is_refused_with_reason(case):
    changed, changed_given, words = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        fp8_backward(BackwardOperands(**{**GIVEN, **changed_given}), **{**CALL, **changed})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_violations_are_reported_together():
    wrong = {"descale_do": 1.0, "lse": ONE, "scale_dp": ONE, "scale_dv": ONE, "o": X[:, :1]}
    with pytest.raises(SpecError) as caught:
        fp8_backward(BackwardOperands(**{**GIVEN, **wrong}), **CALL)
    assert len(caught.value.reasons) == 5
