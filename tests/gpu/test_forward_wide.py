"""Head dims above 256: a forward whose output two warpgroups share, against float64."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import AttentionSpec
from attngen.errors import SpecError

from . import cases, oracle, test_decode, test_paged_prompt, varlen
from .varlen import Call, Features

pytestmark = pytest.mark.gpu


def case_of(d, d_v, **fields):
    return cases.Case(d, d_v, **{"heads": (1, 2, 1), "lengths": (130, 200), **fields})


CASES = [
    case_of(512, 512),
    case_of(512, 512, mask="causal", lengths=(200, 200)),
    case_of(320, 320, mask="causal_bottom_right", dtype="fp16", layout="bhsd"),
    case_of(576, 512, mask="causal", window=(70, 0), layout="sbhd"),
    case_of(264, 72, window=(5, 90), lengths=(65, 127)),
    case_of(128, 448, lengths=(1, 300)),
    case_of(64, 264, lengths=(300, 65), heads=(3, 4, 4)),
    case_of(512, 64, mask="causal", lengths=(200, 200)),
    case_of(576, 40, window=(70, 5)),
]
CALLS = [
    Call("thd", (70, 0, 130), (7, 30, 200), gaps=True, d=512, mask="causal_bottom_right",
         more=Features("h", softmax="learnable")),
    Call("bshd", (130, 40), (77, 130), room=(130, 140), d=320, heads=(4, 2), mask="padding_causal",
         more=Features(softcap=1.5, max_logit=True)),
    Call("bshd", (130,), (200,), d=300, d_v=77, heads=(2, 1), more=Features(dropout=0.1)),
    Call("sbhd", (130,), (77,), d=512, loose="rows2", mask="causal", more=Features(seen=0.5)),
    Call("bshd", (130,), (200,), d=576, d_v=512, heads=(2, 1), mask="causal",
         more=Features(bias="post_scale", bias_shape="1hss", dropout=0.1)),
    Call("bshd", (70,), (70,), d=384, more=Features("", 2.0, seen=0.5, bias="pre_scale")),
    Call("bshd", (130,), (200,), d=300, d_v=7, heads=(2, 1), mask="causal"),
    Call("thd", (70, 130), (30, 200), d=576, d_v=64, more=Features(bias="post_scale", dropout=0.1)),
]  # fmt: skip
PAGED_DIMS = [(512, 512), (576, 512), (320, 72), (512, 64), (128, 448)]
PAGED = [
    AttentionSpec(d, d_v, kv_dtype="bf16", out_dtype="bf16", layout=layout, mask=mask)
    for d, d_v in PAGED_DIMS
    for layout in (test_decode.PAGED, test_paged_prompt.PACKED)
    for mask in ("none", "causal")
]
KERNELS = [*dict.fromkeys(each.spec for each in (*CASES, *CALLS)), *PAGED]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_wide_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_forward_wide_with_features_and_lengths_is_right(call):
    varlen.check_forward(call)


@pytest.mark.parametrize("page", [1, 3, 16, 64, 100, 1024])
def test_wide_prompt_over_pages_of_any_size_is_right(page):
    pages = test_decode.cache([300, 0, 128, 601], 1, 512, page)
    test_decode.check(test_decode.queries(4, 130, 2, 512), pages, mask="causal_bottom_right")


@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("dims", PAGED_DIMS, ids=str)
def test_wide_prompt_over_pages_is_right(dims, mask):
    d, d_v = dims
    pages = test_decode.cache([700, 0, 128, 401], 1, d, 64, d_v)
    test_decode.check(test_decode.queries(4, 140, 2, d), pages, mask=mask)


@pytest.mark.parametrize("more", test_paged_prompt.MORE, ids=lambda more: "+".join(more))
def test_biases_masks_and_dropout_of_wide_heads_over_pages_are_right(more):
    for turn, queries in enumerate((1, 130)):
        pages = test_decode.cache([200, 0, 128, 201], 2, 512, 16)
        given = test_paged_prompt.beside(more, queries, pages.table.shape[1] * 16, turn)
        q = test_decode.queries(4, queries, 4, 512)
        test_decode.check(q, pages, mask="causal_bottom_right", **given)


def test_packed_wide_prompts_over_pages_are_right_under_windows():
    counts = [1, 140, 0, 7]
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(oracle.DEVICE)
    pages = test_decode.cache([700, 264, 90, 7], 1, 512, 32)
    q = oracle.randn(sum(counts), 2, 512, seed=3)
    layout = test_paged_prompt.PACKED
    given = {"cu_seqlens_q": ends, "window": (70, 0), "bottom_right": True, "softcap": 3.0}
    given |= {"bias": oracle.randn(4, 1, 140, 704, seed=31)}
    test_decode.check(q, pages, layout, **given)


def test_forward_wide_takes_the_bits_of_a_mask_mod():
    def mod(b, h, i, j):
        return (i // 70 == j // 70) | (j < 3) & (h == 1)

    operands = case_of(512, 512, lengths=(300, 420)).operands()
    oracle.check_call(*operands, mask_mod=mod)


def test_forward_wide_joins_what_is_there_in_float32():
    case = case_of(512, 512, mask="causal", lengths=(130, 130))
    operands = case.operands()
    expected = oracle.truth(*operands, **case.arguments)
    out, *_ = torch.ops.attngen.forward(*operands, mask="causal", out_dtype="float32")
    assert out.dtype == torch.float32
    oracle.check(out, None, expected)


def test_gradient_of_the_widest_heads_is_refused_by_name():
    q, k, v = (x.requires_grad_() for x in case_of(576, 512).operands())
    with pytest.raises(SpecError, match="head dims above 512 have none"):
        attngen.attention(q, k, v, backend="cuda")


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_forward_wide_of_many_tiles_is_right_and_runs_agree(mask):
    operands = oracle.operands(2, 8, 2, 1500, 2100, 512)
    oracle.check_call(*operands, mask=mask)
    runs = [attngen.attention(*operands, mask=mask, backend="cuda") for _ in range(20)]
    assert all(torch.equal(runs[0], each) for each in runs)
