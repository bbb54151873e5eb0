"""Few queries a sequence, dense and over pages: split keys, lengths on the device, graphs."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec
from attngen.runtime import load

from . import gradients, oracle

pytestmark = pytest.mark.gpu
PAGED = "paged_kv_bshd_bshd_bshd"
WIDE = [(576, 512), (64, 512), (320, 384), (512, 256), (264, 320), (560, 264), (328, 456)]
KERNELS = [
    AttentionSpec(d, kv_dtype="bf16", out_dtype="bf16", layout=layout, mask=mask, decode=True)
    for d in (64, 128, 256)
    for layout in ("bshd", PAGED)
    for mask in ("none", "causal")
]
KERNELS += [
    AttentionSpec(d, d_v, kv_dtype="bf16", out_dtype="bf16", layout=PAGED, mask=mask, decode=True)
    for d, d_v in (*WIDE, (192, None))
    for mask in ("none", "causal")
]


class Cache(NamedTuple):
    """Pages of K and V in any order, whose table's rows are longer than needed, and lengths."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor

    def __str__(self) -> str:
        return f"pages{list(self.k.shape)}"


def cache(
    lengths: list[int],
    heads: int,
    d: int,
    page: int = 64,
    d_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Cache:
    """Random pages; what no sequence uses is NaN, and entries behind the last page are no pages."""
    counts = [-(-n // page) for n in lengths]
    width, total = max(counts) + 2, sum(counts) + 3
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator)[: sum(counts)].to(torch.int32)
    table = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)
    k, v = (
        oracle.randn(total, page, heads, n, dtype=dtype, seed=seed + part)
        for part, n in ((1, d), (2, d_v or d))
    )
    unused = torch.ones(total, page, dtype=torch.bool)
    for row, (length, pages) in enumerate(zip(lengths, order.split(counts), strict=True)):
        table[row, : len(pages)] = pages
        for place, number in enumerate(pages.tolist()):
            unused[number, : length - place * page] = False
    k[unused.to(oracle.DEVICE)] = math.nan
    v[unused.to(oracle.DEVICE)] = math.nan
    held = torch.tensor(lengths, dtype=torch.int32, device=oracle.DEVICE)
    return Cache(k, v, table.to(oracle.DEVICE), held)


def queries(batch: int, s_q: int, heads: int, d: int, seed: int = 9) -> Tensor:
    return oracle.randn(batch, s_q, heads, d, seed=seed)


def check(q: Tensor, pages: Cache, layout: str = PAGED, **arguments) -> None:
    """The float64 rule. The reference reads what a table names, so it gets a table of pages."""
    k, v = pages.k, pages.v
    if layout.endswith("sbhd_sbhd"):
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    if layout.startswith("paged_kv_sbhd"):
        q = q.transpose(0, 1).contiguous()
    named = {"layout": layout, "seqused_kv": pages.lengths, **arguments}
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            q, k, v, page_table=pages.table, **named, backend="cuda", return_lse=True
        )
    named.pop("num_splits", None)
    table = pages.table.clamp(max=pages.k.shape[0] - 1)
    oracle.check(out, aux.lse, oracle.truth(q, k, v, page_table=table, **named), layout)


def check_rows_alone(q: Tensor, pages: Cache, **named) -> None:
    """A sequence's output has the same bits whatever else is in the batch."""

    def call(rows: slice | list[int]) -> Tensor:
        return attngen.attention(
            q[rows], pages.k, pages.v, layout=PAGED, page_table=pages.table[rows],
            seqused_kv=pages.lengths[rows], backend="cuda", **named,
        )  # fmt: skip

    whole = call(slice(None))
    for rows in ([3], [0, 5], [5, 4, 3, 2, 1, 0]):
        assert torch.equal(call(rows), whole[rows])


@pytest.mark.parametrize("page", [1, 2, 3, 4, 7, 8, 12, 16, 32, 48, 64, 100, 128, 256, 1000])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_decode_every_page_size_is_right(d, page):
    check(queries(4, 1, 8, d), cache([700, 1, 64, 333], 2, d, page))


@pytest.mark.parametrize("splits", [None, 1, 2, 5, 33, 128])
@pytest.mark.parametrize("lengths", [[5000, 3, 0, 64], [1], [65, 4096]], ids=str)
def test_decode_any_number_of_splits_is_right(lengths, splits):
    check(queries(len(lengths), 1, 8, 128), cache(lengths, 1, 128), num_splits=splits)


def places() -> tuple[int, int]:
    """SMs of the device, and heads of sequences of which some ten fill them."""
    found = load.multiprocessors(0)
    return found, max(1, found // 16)


def check_layout(layout: str, lengths: list[int], heads: int, d: int) -> None:
    """Over pages, or dense, where equal lengths are those of the tensors."""
    q = queries(len(lengths), 1, 2 * heads, d)
    if layout == PAGED:
        check(q, cache(lengths, heads, d))
        return
    k, v = (oracle.randn(len(lengths), max(lengths), heads, d, seed=part) for part in (1, 2))
    if len({*lengths}) > 1:
        held = torch.tensor(lengths, dtype=torch.int32, device=oracle.DEVICE)
        oracle.check_call(q, k, v, seqused_kv=held)
    else:
        oracle.check_call(q, k, v)


@pytest.mark.parametrize("layout", [PAGED, "bshd"])
@pytest.mark.parametrize("share", [1.2, 1.5, 1.8])
def test_decode_ctas_that_share_sms_unevenly_are_right(share, layout):
    sms, heads = places()
    n = round(share * sms / heads)
    check_layout(layout, [i * 37 % 300 for i in range(n)], heads, 128)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
@pytest.mark.parametrize("blocks", [(50,), (50, 0, 17, 90)], ids=str)
def test_decode_ctas_that_wait_for_each_other_are_right(d, mask, blocks):
    """An SM each, pages that hold a block, and enough blocks for CTAs to count them."""
    sms, heads = places()
    n = sms // heads
    size = 64 if d > 64 else 128
    pages = cache([blocks[i % len(blocks)] * size + i % 9 for i in range(n)], heads, d, size)
    for seed in (3, 4):
        check(queries(n, 1, 2 * heads, d, seed), pages, mask=mask, num_splits=1)


@pytest.mark.parametrize("blocks", [(50,), (50, 1, 17, 90)], ids=str)
def test_decode_dense_ctas_that_wait_for_each_other_are_right(blocks):
    sms, heads = places()
    lengths = [blocks[i % len(blocks)] * 64 for i in range(sms // heads)]
    check_layout("bshd", lengths, heads, 128)


@pytest.mark.parametrize("s_q", [1, 2, 3, 7, 16, 40, 150])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 2), (71, 1)], ids=str)
def test_decode_several_queries_share_tiles_rightly(heads, s_q):
    pages = cache([300, 64, 17, 513], heads[1], 128, 16)
    splits = 2 if s_q >= 128 else None  # else a prompt
    for mask in ("none", "causal_bottom_right"):
        check(queries(4, s_q, heads[0], 128), pages, mask=mask, num_splits=splits)


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 5), (5, -1)], ids=str)
def test_decode_windows_skip_and_mask_rightly(window):
    pages = cache([1000, 90, 4, 300], 2, 64)
    for splits in (1, 3):
        check(queries(4, 5, 4, 64), pages, window=window, bottom_right=True, num_splits=splits)


@pytest.mark.parametrize(
    "layout", ["paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd", "paged_kv_sbhd_sbhd_sbhd"]
)
def test_decode_paged_layouts_are_right(layout):
    check(queries(3, 2, 4, 64), cache([100, 200, 33], 2, 64, 32), layout)


@pytest.mark.parametrize("dims", [(192, 128), (80, 48), (8, 8), (40, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode_head_dims_and_dtypes_are_right(dims, dtype):
    pages = cache([200, 900], 2, dims[0], 32, dims[1], dtype)
    check(oracle.randn(2, 3, 4, dims[0], dtype=dtype), pages, mask="causal_bottom_right")


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_decode_latent_keys_whose_first_columns_are_the_values_are_right(heads, splits):
    """Head dims 576 and 512 with one key/value head, as multi-head latent attention decodes."""
    pages = cache([700, 1, 64, 2033], 1, 576, 64)
    shared = pages._replace(v=pages.k[..., :512])
    for s_q in (1, 2):
        given = {"mask": "causal_bottom_right", "num_splits": splits}
        check(queries(4, s_q, heads, 576), shared, softmax_scale=192**-0.5, **given)


@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("page", [1, 48, 64])
def test_decode_wide_head_dims_are_right(dims, page):
    pages = cache([300, 0, 65], 2, dims[0], page, dims[1])
    check(queries(3, 2, 6, dims[0]), pages, mask="causal_bottom_right")
    given = {"window": (100, 0), "bottom_right": True, "softmax": "off_by_one"}
    check(queries(3, 2, 6, dims[0]), pages, **given)


@pytest.mark.parametrize("sizes", [(32, 64), (1, 48), (256, 5)], ids=str)
def test_decode_tables_of_their_own_for_k_and_v_are_right(sizes):
    a, b = cache([300, 70], 2, 64, sizes[0]), cache([300, 70], 2, 64, sizes[1], seed=5)
    q = queries(2, 1, 4, 64)
    named = {"layout": PAGED, "seqused_kv": a.lengths}
    out = attngen.attention(q, a.k, b.v, page_table=(a.table, b.table), **named, backend="cuda")
    tables = tuple(x.table.clamp(max=x.k.shape[0] - 1) for x in (a, b))
    expected = oracle.truth(q, a.k, b.v, page_table=tables, **named)
    oracle.check(out, None, expected, PAGED)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_decode_packed_queries_over_pages_are_right(splits, padded):
    counts, gaps = [1, 40, 0, 7, 300], [3, 0, 5, 0, 2]
    pages = cache([700, 64, 90, 7, 333], 2, 128, 32)
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(oracle.DEVICE)
    offsets = None
    total = sum(counts)
    if padded:  # rows of no sequence before the first, between, and behind the last
        steps = [4, *(n + gap for n, gap in zip(counts, gaps, strict=True))]
        offsets = torch.tensor(steps).cumsum(0).to(torch.int32).to(oracle.DEVICE)
        total = int(offsets[-1]) + 6
    q = oracle.randn(total, 8, 128, seed=3)
    for kv in ("bshd", "sbhd"):
        check(
            q, pages, f"paged_kv_thd_{kv}_{kv}", cu_seqlens_q=ends, num_splits=splits,
            cu_seqlens_q_padded=offsets, mask="causal_bottom_right",
        )  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_queries_in_use_over_pages_are_right(splits):
    pages, q = cache([700, 64, 90, 333], 2, 128, 32), queries(4, 5, 8, 128)
    used = torch.tensor([5, 0, 3, 1], dtype=torch.int32, device=oracle.DEVICE)
    for row, n in enumerate(used.tolist()):
        q[row, n:] = math.nan
    for mask in ("none", "causal_bottom_right"):
        check(q, pages, seqused_q=used, mask=mask, num_splits=splits)


@pytest.mark.device
def test_decode_more_sequences_than_a_grid_axis_has_places():
    q, k, v = oracle.operands(1 << 17, 1, 1, 1, 1, 64)
    out = attngen.attention(q, k, v, backend="cuda")
    assert torch.equal(out, v)  # one key has all the weight


@pytest.mark.parametrize("lengths", [(1, 4000), (1, 1), (3, 700), (16, 16), (64, 100)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_decode_dense_calls_are_right(lengths, layout):
    for mask in ("none", "causal", "causal_bottom_right"):
        oracle.check_call(
            *oracle.operands(3, 4, 4, *lengths, 64, layout=layout), mask=mask, layout=layout
        )
        oracle.check_call(
            *oracle.operands(2, 8, 2, *lengths, 128, layout=layout), mask=mask, layout=layout
        )


def test_decode_dense_lengths_on_the_device_are_right():
    q, k, v = oracle.operands(3, 8, 2, 1, 500, 128)
    lengths = torch.tensor([0, 17, 500], dtype=torch.int32, device=oracle.DEVICE)
    for row, n in enumerate(lengths.tolist()):
        k[row, n:], v[row, n:] = math.nan, math.nan
    oracle.check_call(q, k, v, seqused_kv=lengths)
    oracle.check_call(q, k, v, seqused_kv=lengths, mask="padding_causal_bottom_right")


@pytest.mark.parametrize("s_q", [1, 200], ids=["split keys", "prompt"])
@pytest.mark.parametrize("page", [16, 64, 100])
def test_decode_pages_that_do_not_exist_are_read_as_zeros(page, s_q):
    """And are not waited for."""
    pages, q = cache([900, 500], 2, 128, page), queries(2, s_q, 8, 128)
    k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (pages.k, pages.v))
    found = []
    for below, above in ((-1, 1 << 30), (len(k) - 1, len(k) - 1)):
        table = pages.table.clone()
        table[0, 1], table[1, 0] = below, above
        out = attngen.attention(
            q, k, v, layout=PAGED, mask="causal_bottom_right", page_table=table,
            seqused_kv=pages.lengths, backend="cuda",
        )  # fmt: skip
        found.append(out)
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_result_does_not_depend_on_the_batch(splits):
    """With a given number of splits, bit for bit."""
    pages, q = cache([4000, 70, 1, 2500, 0, 640], 2, 128), queries(6, 2, 8, 128)
    check_rows_alone(q, pages, num_splits=splits, bottom_right=True)


@pytest.mark.device
@pytest.mark.parametrize("splits", [None, 7])
def test_decode_graph_replay_follows_changed_lengths_and_pages(splits):
    pages, q = cache([900, 900, 900], 2, 128), queries(3, 1, 8, 128)
    lengths, table = pages.lengths.clone(), pages.table.clone()

    def call() -> Tensor:
        return attngen.attention(
            q, pages.k, pages.v, layout=PAGED, page_table=table, seqused_kv=lengths,
            num_splits=splits, backend="cuda",
        )  # fmt: skip

    graph, out = oracle.capture(call)
    for number in range(5):
        lengths.copy_(torch.tensor([number * 200, 900 - number, 1 + number], dtype=torch.int32))
        table[:, :15] = pages.table[torch.randperm(3), :15]
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.device
def test_decode_streams_at_once_do_not_meet():
    pages, wanted, found = cache([3000, 100], 2, 64), [], []
    given = [queries(2, 1, 4, 64, seed) for seed in range(4)]
    named = {"layout": PAGED, "page_table": pages.table, "seqused_kv": pages.lengths}
    call = lambda q: attngen.attention(q, pages.k, pages.v, **named, backend="cuda")  # noqa: E731
    wanted = [call(q) for q in given]
    torch.cuda.synchronize()
    for q in given * 5:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(call(q))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted * 5, strict=True))


@pytest.mark.parametrize("lengths", [(1, 300), (5, 64)], ids=str)
def test_decode_calls_have_gradients(lengths):
    q, k, v = oracle.operands(2, 8, 2, *lengths, 64)
    tensors = q, k, v, oracle.randn(*q.shape, seed=50)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attngen.attention(*leaves, mask="causal_bottom_right", backend="cuda")
    found = torch.autograd.grad(out, leaves, tensors[3])
    gradients.check(found, tensors, None, mask="causal_bottom_right")
