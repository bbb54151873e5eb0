"""Prompts, or chunks of them, over pages: the forward's kernels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec

from . import oracle
from .test_decode import PAGED, cache, check, check_rows_alone, queries
from .test_decode_scores import CHOICES, check_all, spec_of

pytestmark = pytest.mark.gpu
PACKED = "paged_kv_thd_bshd_bshd"
LENGTHS = [700, 0, 128, 1501]
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (72, 40)]
KERNELS = [
    AttentionSpec(
        d, d_v, kv_dtype="bf16", out_dtype="bf16", layout=layout, mask=mask, window=window
    )
    for d, d_v in DIMS
    for layout in (PAGED, PACKED)
    for mask, window in (("none", False), ("causal", False), ("none", True))
]
MORE = [
    {"bias": "post_scale"},
    {"bias": "pre_scale", "attn_mask": True, "dropout": True},
    {"attn_mask": True},
    {"dropout": True},
]
KERNELS += [
    AttentionSpec(d, kv_dtype="bf16", out_dtype="bf16", layout=layout, mask="causal", **more)
    for d in (64, 128, 256)
    for layout in (PAGED, PACKED)
    for more in MORE
]
KERNELS += [
    dataclasses.replace(spec_of(choice, d), decode=False)
    for choice in (CHOICES[4], *CHOICES[-4:])
    for d in (64, 128)
]


@pytest.mark.parametrize("page", [1, 3, 8, 16, 48, 64, 100, 256, 1024])
@pytest.mark.parametrize("d", [64, 128])
def test_prompt_over_pages_of_any_size_is_right(d, page):
    check(queries(4, 130, 4, d), cache(LENGTHS, 2, d, page), mask="causal_bottom_right")


@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("s_q", [128, 200, 513])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_prompt_over_pages_is_right(dims, s_q, mask):
    d, d_v = dims
    check(queries(4, s_q, 4, d), cache(LENGTHS, 2, d, 64, d_v), mask=mask)


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 5), (5, -1)], ids=str)
def test_prompt_windows_over_pages_are_right(window):
    for d in (64, 128):
        pages = cache(LENGTHS, 2, d, 32)
        check(queries(4, 300, 4, d), pages, window=window, bottom_right=True)


@pytest.mark.parametrize("choice", [CHOICES[4], *CHOICES[-4:]], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_prompt_scores_and_sinks_over_pages_are_right(d, choice):
    for turn, s_q in enumerate((140, 300)):
        check_all(choice, queries(4, s_q, 4, d), cache(LENGTHS, 2, d, 16), turn, None)


def beside(more: dict, queries: int, room: int, turn: int) -> dict:
    """Bias, mask and dropout of a call of 4 sequences with 4 heads, of shapes that take turns."""
    shape = [(1, 4), (4, 1), (4, 4), (1, 1)][turn % 4] + (queries, room)
    given = {}
    if "bias" in more:
        given |= {"bias": oracle.randn(*shape, seed=31), "bias_type": more["bias"]}
    if "attn_mask" in more:
        given["attn_mask"] = oracle.randn(*shape, seed=32) > -0.5
    if "dropout" in more:
        given |= {"dropout_p": 0.25, "rng_state": torch.tensor([3, 9], device=oracle.DEVICE)}
    return given


@pytest.mark.parametrize("s_q", [1, 5, 130])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("more", MORE, ids=lambda more: "+".join(more))
def test_biases_masks_and_dropout_over_pages_are_right(more, d, s_q):
    """Few queries, too, which the forward's kernels take where there is any of these."""
    for turn, page in enumerate((16, 100)):
        pages = cache(LENGTHS, 2, d, page)
        room = pages.table.shape[1] * page
        given = beside(more, s_q, room, turn + s_q)
        check(queries(4, s_q, 4, d), pages, mask="causal_bottom_right", **given)


@pytest.mark.parametrize("more", MORE, ids=lambda more: "+".join(more))
def test_biases_masks_and_dropout_of_packed_queries_over_pages_are_right(more):
    counts = [1, 140, 0, 7]
    pages, longest = cache([700, 764, 90, 7], 2, 128, 32), 140
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(oracle.DEVICE)
    q = oracle.randn(sum(counts), 4, 128, seed=3)
    given = beside(more, longest, pages.table.shape[1] * 32, 1)
    check(q, pages, PACKED, cu_seqlens_q=ends, mask="causal_bottom_right", **given)


@pytest.mark.parametrize(
    "layout", ["paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd", "paged_kv_sbhd_sbhd_sbhd"]
)
def test_prompt_paged_layouts_are_right(layout):
    check(queries(3, 140, 4, 64), cache([100, 200, 333], 2, 64, 32), layout)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_prompt_of_packed_queries_over_pages_is_right(d, padded):
    counts, gaps = [1, 740, 0, 7, 300], [3, 0, 5, 0, 2]
    pages = cache([700, 764, 90, 7, 333], 2, d, 32)
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(oracle.DEVICE)
    offsets, total = None, sum(counts)
    if padded:  # rows of no sequence before the first, between, and behind the last
        steps = [4, *(n + gap for n, gap in zip(counts, gaps, strict=True))]
        offsets = torch.tensor(steps).cumsum(0).to(torch.int32).to(oracle.DEVICE)
        total = int(offsets[-1]) + 6
    q = oracle.randn(total, 4, d, seed=3)
    for kv in ("bshd", "sbhd"):
        check(
            q, pages, f"paged_kv_thd_{kv}_{kv}", cu_seqlens_q=ends, cu_seqlens_q_padded=offsets,
            mask="causal_bottom_right",
        )  # fmt: skip


def test_prompt_queries_in_use_over_pages_are_right():
    pages, q = cache([700, 64, 190, 333], 2, 128, 32), queries(4, 200, 4, 128)
    used = torch.tensor([200, 0, 150, 1], dtype=torch.int32, device=oracle.DEVICE)
    for row, n in enumerate(used.tolist()):
        q[row, n:] = math.nan
    for mask in ("none", "causal_bottom_right"):
        check(q, pages, seqused_q=used, mask=mask)


@pytest.mark.parametrize("sizes", [(32, 64), (1, 48), (256, 5)], ids=str)
def test_prompt_tables_of_their_own_for_k_and_v_are_right(sizes):
    a, b = (cache([300, 170], 2, 64, n, seed=n) for n in sizes)
    named = {"layout": PAGED, "seqused_kv": a.lengths, "mask": "causal"}
    q = queries(2, 150, 4, 64)
    out = attngen.attention(q, a.k, b.v, page_table=(a.table, b.table), **named, backend="cuda")
    tables = tuple(x.table.clamp(max=x.k.shape[0] - 1) for x in (a, b))
    oracle.check(out, None, oracle.truth(q, a.k, b.v, page_table=tables, **named), PAGED)


@pytest.mark.slow
def test_prompt_result_does_not_depend_on_the_batch():
    """Bit for bit, whatever tiles of others are drawn beside it."""
    pages, q = cache([1500, 170, 128, 2500, 0, 640], 2, 128), queries(6, 300, 8, 128)
    check_rows_alone(q, pages, mask="causal_bottom_right")


@pytest.mark.device
def test_prompt_graph_replay_follows_changed_lengths_and_pages():
    pages, q = cache([900, 900, 900], 2, 128), queries(3, 256, 4, 128)
    lengths, table = pages.lengths.clone(), pages.table.clone()

    def call() -> Tensor:
        return attngen.attention(
            q, pages.k, pages.v, layout=PAGED, page_table=table, seqused_kv=lengths,
            mask="causal_bottom_right", backend="cuda",
        )  # fmt: skip

    graph, out = oracle.capture(call)
    for number in range(4):
        lengths.copy_(torch.tensor([number * 200, 900 - number, 1 + number], dtype=torch.int32))
        table[:, :15] = pages.table[torch.randperm(3), :15]
        graph.replay()
        assert torch.equal(out, call())
