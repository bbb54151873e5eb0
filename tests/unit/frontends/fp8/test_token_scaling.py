"""Recipes with a scale a token and head."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import SpecError, fp8
from attngen.call.recipe import CastRule
from attngen.frontends.pytorch.token_scales import by_heads
from attngen.reference import fp8_checks, fp8_scales

TOKEN = fp8.Float8CurrentScaling(scaling="token")


def carriers(layout):
    """Operands of a layout, the same numbers in each."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 40, 2, 32, generator=generator).bfloat16().unbind()
    made = {
        "bshd": (q, k, v),
        "sbhd": tuple(x.transpose(0, 1) for x in (q, k, v)),
        "bhsd": tuple(x.transpose(1, 2) for x in (q, k, v)),
        "bs3hd": (torch.stack([q, k, v], 2),),
        "bshd_bsh2d": (q, torch.stack([k, v], 3)),
    }
    return made[layout]


def run(layout="bshd", change=lambda tensors: tensors, **more):
    tensors = [x.detach().clone().requires_grad_() for x in change(carriers(layout))]
    with fp8.autocast(recipe=TOKEN):
        out = attngen.attention(*tensors, layout=layout, mask="causal", **more)
    return out, tensors


@pytest.mark.parametrize("layout", ["sbhd", "bhsd", "bs3hd", "bshd_bsh2d"])
def test_layouts_have_the_same_bits(layout):
    wanted, _ = run()
    found, tensors = run(layout)
    order = {"sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}.get(layout, (0, 1, 2, 3))
    assert torch.equal(found.permute(order), wanted)
    found.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def test_stored_numbers_are_scaled_by_their_own_token():
    x, *_ = carriers("bshd")
    x = x * torch.exp2(torch.arange(40.0))[:, None, None].bfloat16()
    rule = CastRule("float8_e4m3fn", by_token=True)
    (stored,), numbers, _ = fp8_scales.narrowed([x], [None], rule)
    amax, scale, descale = (row.view(2, 40, 2, 1) for row in numbers)
    assert torch.equal(amax[..., 0], x.float().abs().amax(-1))
    assert (stored.float().abs().amax(-1) > 224 - 16).all()  # a power of two below the largest
    assert torch.equal(scale * descale, torch.ones_like(scale))
    assert ((stored.float() * descale - x.float()).abs() <= amax * 2.0**-4).all()


def test_suffix_leaves_a_prefix_alone():
    def louder(tensors):
        return [torch.where(torch.arange(40)[:, None, None] >= 23, x * 90, x) for x in tensors]

    before, _ = run()
    after, _ = run(change=louder)
    assert torch.equal(before[:, :23], after[:, :23]) and not torch.equal(before, after)


def test_gradients_are_near_those_of_16_bits():
    found, tensors = run()
    wide = [x.detach().clone().requires_grad_() for x in tensors]
    wanted = attngen.attention(*wide, mask="causal")
    d_o = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    pairs = zip(
        torch.autograd.grad(found, tensors, d_o),
        torch.autograd.grad(wanted, wide, d_o),
        strict=True,
    )
    assert all(float((a - b).float().norm() / b.float().norm()) < 0.08 for a, b in pairs)


@pytest.mark.parametrize("backward", ["fp8", "mixed"])
def test_backward_in_8_bits_is_refused(backward):
    with pytest.raises(SpecError, match="scaling='token' has gradients in 16 bits"):
        fp8.Float8CurrentScaling(scaling="token", backward=backward)


def test_unknown_scaling_is_refused():
    with pytest.raises(SpecError, match="scaling needs tensor, token; got 'row'"):
        fp8.Float8CurrentScaling(scaling="row")


def joined(layout):
    """The sequences of `carriers` behind each other, with rows of none, NaN, between them."""
    q, k, v = carriers("bshd")
    none = torch.full_like(q[0, :3], float("nan"))
    q, k, v = (torch.cat([x[0, :25], none, x[1]]) for x in (q, k, v))
    made = {
        "thd": (q, k, v),
        "t3hd": (torch.stack([q, k, v], 1),),
        "thd_th2d": (q, torch.stack([k, v], 2)),
    }
    return made[layout]


@pytest.mark.parametrize("layout", ["thd", "t3hd", "thd_th2d"])
def test_packed_tokens_have_the_bits_of_each_sequence(layout):
    (q, k, v), used = carriers("bshd"), torch.tensor([0, 25, 65], dtype=torch.int32)
    padded = torch.tensor([0, 28, 68], dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv")
    lengths = {**dict.fromkeys(names, used)}
    lengths |= {f"{name}_padded": padded for name in names}
    tensors = [x.clone().requires_grad_() for x in joined(layout)]
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with fp8.autocast(recipe=TOKEN):
        out = attngen.attention(*tensors, layout=layout, mask="padding_causal", **lengths)
        alone = [
            attngen.attention(*(x[b : b + 1, :n] for x in (q, k, v)), mask="causal")[0]
            for b, n in enumerate((25, 40))
        ]
    assert torch.equal(out[:25], alone[0]) and torch.equal(out[28:], alone[1])
    for rows in ([out[:25], out[28:]], alone):
        torch.cat(rows).float().square().sum().backward()
    first = tensors[0].grad
    found, wanted = (first[:, 0], q.grad) if layout == "t3hd" else (first, q.grad)
    assert torch.equal(found[:25], wanted[0, :25]) and torch.equal(found[28:], wanted[1])
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def test_pages_are_refused():
    with pytest.raises(SpecError, match="lie in no pages"):
        by_heads(dict.fromkeys(["descale_q"]), "paged_kv_bshd_bshd_bshd")


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"descale_k": None},
            "descale_k: scales a token and head are those of q, k and v together",
        ),
        (
            {"descale_v": torch.ones(2, 2, 39)},
            r"descale_v needs float32 .* or \[b=2, h_kv=2, s_kv=40\]",
        ),
    ],
)
def test_scales_of_other_shapes_are_refused(change, reason):
    tensors = [x.to(torch.float8_e4m3fn) for x in carriers("bshd")]
    scales = {f"descale_{name}": torch.ones(2, 2, 40) for name in "qkv"}
    with pytest.raises(SpecError, match=reason):
        attngen.attention(*tensors, **{**scales, **change})


def test_wrong_values_are_named_but_not_each_of_thousands():
    scales = {f"descale_{name}": torch.ones(2, 2, 40) for name in "qkv"}
    scales["descale_k"][1, 0, 3:] = float("nan")
    reasons = [*fp8_checks.scale_values(scales)]
    assert len(reasons) == 4
    assert reasons[0].startswith("descale_k[1, 0, 3]=nan: scales are finite")
    assert reasons[0].endswith("So are 33 other places.")


def test_scales_of_packed_tokens_are_those_of_one_sequence():
    tensors = torch.zeros(3, 50, 2, 32).to(torch.float8_e4m3fn)
    ends = torch.tensor([0, 20, 50], dtype=torch.int32)
    more = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    scales = {f"descale_{name}": torch.ones(1, 2, 50) for name in "qkv"}
    assert attngen.attention(*tensors, **scales, **more).shape == (50, 2, 32)
    scales["descale_q"] = torch.ones(2, 2, 25)
    with pytest.raises(SpecError, match=r"descale_q needs float32 .* or \[1, h_q=2, t_q=50\]"):
        attngen.attention(*tensors, **scales, **more)


def test_scales_go_with_tokens_behind_left_padding():
    tensors = [x.to(torch.float8_e4m3fn) for x in carriers("bshd")]
    generator = torch.Generator().manual_seed(3)
    scales = {f"descale_{n}": torch.rand(2, 2, 40, generator=generator) + 0.5 for n in "qkv"}
    starts = torch.tensor([3, 10])
    found = attngen.attention(
        *tensors, mask="padding_causal", seqstart_q=starts, seqstart_kv=starts, **scales
    )
    for b, first in enumerate(starts):
        own = {name: x[b : b + 1, :, first:] for name, x in scales.items()}
        rows = [x[b : b + 1, first:] for x in tensors]
        assert torch.equal(found[b, first:], attngen.attention(*rows, mask="causal", **own)[0])
