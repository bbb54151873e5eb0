"""FP8 keys and values beside 16-bit queries in the forward's kernels: prompts, dense and paged."""

from __future__ import annotations

import math

import pytest
import torch

import attngen
from attngen import AttentionSpec

from . import oracle
from .kv_cache import check, check_call, check_pages, make_scales, narrow, pages
from .oracle_fp8 import DTYPES
from .test_decode import PAGED, queries
from .test_decode_scores import CHOICES, arguments

pytestmark = pytest.mark.gpu
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (80, 48), (16, 256), (208, 240)]
LENGTHS = [700, 0, 128, 1501]
KERNELS = [
    AttentionSpec(*dims, kv_dtype="e4m3", out_dtype="bf16", layout=layout, mask=mask)
    for dims in DIMS
    for layout in ("bshd", PAGED)
    for mask in ("none", "causal")
]


@pytest.mark.parametrize("lengths", [(257, 200), (130, 333), (200, 1), (1000, 1000)], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_kv_fp8_prompt_is_right(dims, lengths):
    for number, mask in enumerate(("none", "causal", "causal_bottom_right")):
        q, k, v = oracle.operands(2, 4, (4, 2, 1)[number], *lengths, *dims)
        scales = make_scales(("", "one", "head")[number], 2, k.shape[2])
        check_call(q, narrow(k, "e4m3"), narrow(v, "e4m3"), mask=mask, **scales)


@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_kv_fp8_prompt_formats_and_layouts_are_right(kv, dtype, layout):
    q, k, v = oracle.operands(2, 8, 2, 300, 450, 128, layout=layout)
    given = {"layout": layout, "mask": "causal", **make_scales("head", 2, 2)}
    check_call(q.to(DTYPES[dtype]), narrow(k, kv), narrow(v, kv), **given)


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 5), (5, -1)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_kv_fp8_prompt_windows_are_right(d, window):
    given = {"window": window, "bottom_right": True}
    q, k, v = oracle.operands(2, 4, 2, 400, 500, d)
    check_call(q, narrow(k, "e4m3"), narrow(v, "e4m3"), **given)
    cached = pages(LENGTHS, 2, d, 32, scales="head")
    check_pages(queries(4, 300, 4, d), cached, **given)


@pytest.mark.parametrize("page", [1, 3, 8, 16, 48, 64, 100, 256, 1024])
@pytest.mark.parametrize("d", [64, 128])
def test_kv_fp8_prompt_over_pages_of_any_size_is_right(d, page):
    cached = pages(LENGTHS, 2, d, page, scales="head")
    check_pages(queries(4, 130, 4, d), cached, mask="causal_bottom_right")


@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_kv_fp8_prompt_over_pages_is_right(dims, mask):
    cached = pages(LENGTHS, 2, dims[0], 64, dims[1], scales="head")
    check_pages(queries(4, 200, 4, dims[0]), cached, mask=mask)


@pytest.mark.parametrize("choice", CHOICES[4:], ids=lambda c: "-".join((*c[0], c[1])))
def test_kv_fp8_prompt_scores_and_sinks_are_right(choice):
    cached = pages(LENGTHS, 2, 128, 16, scales="head")
    check_pages(queries(4, 140, 4, 128), cached, **arguments(choice, 4, 1))


def test_kv_fp8_prompt_lengths_on_the_device_are_right():
    q, k, v = oracle.operands(3, 4, 2, 200, 500, 128)
    lengths = torch.tensor([0, 170, 500], dtype=torch.int32, device=oracle.DEVICE)
    for row, n in enumerate(lengths.tolist()):
        k[row, n:], v[row, n:] = math.nan, math.nan
    scales = make_scales("head", 3, 2)
    check_call(q, narrow(k, "e4m3"), narrow(v, "e4m3"), seqused_kv=lengths, **scales)


@pytest.mark.parametrize("d", [64, 128])
def test_kv_fp8_prompt_of_packed_tokens_is_right(d):
    counts = [1, 740, 0, 7, 300]
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(oracle.DEVICE)
    q = oracle.randn(sum(counts), 4, d, seed=1)
    k, v = (narrow(oracle.randn(sum(counts), 2, d, seed=n), "e4m3") for n in (2, 3))
    scales = make_scales("head", 5, 2)
    given = {"layout": "thd", "mask": "causal", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    out, aux = attngen.attention(q, k, v, **given, **scales, backend="cuda", return_lse=True)
    check(out, aux.lse, q, k, v, **given, **scales)


@pytest.mark.slow
def test_kv_fp8_prompt_of_many_tiles_is_right():
    q, k, v = oracle.operands(4, 32, 4, 700, 700, 128)
    scales = make_scales("head", 4, 4)
    check_call(q, narrow(k, "e4m3"), narrow(v, "e4m3"), mask="causal", **scales)
