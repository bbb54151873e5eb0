"""FP8 keys and values beside 16-bit queries where keys are split: pages and dense calls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec

from . import oracle
from .kv_cache import check_call, check_pages, dense_of, make_scales, narrow, pages, truth
from .oracle_fp8 import DTYPES
from .test_decode import PAGED, queries
from .test_decode_scores import BATCH, CHOICES, HEADS, LENGTHS, arguments

pytestmark = pytest.mark.gpu
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (80, 48), (16, 16), (576, 512), (304, 272)]


def spec(d: int, d_v: int, layout: str = PAGED, mask: str = "none", kv: str = "e4m3"):
    return AttentionSpec(
        d, d_v, kv_dtype=kv, out_dtype="bf16", layout=layout, mask=mask, decode=True
    )


KERNELS = [spec(*dims, mask=mask) for dims in DIMS for mask in ("none", "causal")]
KERNELS += [spec(128, 128, mask=mask, kv="e5m2") for mask in ("none", "causal")]
KERNELS += [spec(d, d, "bshd", mask) for d in (64, 128) for mask in ("none", "causal")]


@pytest.mark.parametrize("page", [1, 3, 8, 12, 16, 48, 64, 100, 128, 256, 1000])
@pytest.mark.parametrize("d", [64, 128])
def test_kv_fp8_every_page_size_is_right(d, page):
    check_pages(queries(4, 1, 8, d), pages([700, 1, 64, 333], 2, d, page, scales="head"))


@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("scales", ["", "one", "head"])
def test_kv_fp8_formats_and_scales_are_right(kv, dtype, scales):
    q = oracle.randn(3, 3, 8, 128, dtype=DTYPES[dtype], seed=4)
    for splits in (1, 3):
        given = {"mask": "causal_bottom_right", "num_splits": splits}
        check_pages(q, pages([500, 0, 65], 2, 128, 16, kv_dtype=kv, scales=scales), **given)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("lengths", [[300, 0, 65], [2033, 31, 1]], ids=str)
def test_kv_fp8_head_dims_are_right(dims, lengths):
    for splits in (1, None):
        given = {"mask": "causal_bottom_right", "num_splits": splits}
        cached = pages(lengths, 2, dims[0], 48, dims[1], scales="head")
        check_pages(queries(3, 2, 6, dims[0]), cached, **given)


@pytest.mark.parametrize("splits", [None, 1, 2, 33, 128])
def test_kv_fp8_any_number_of_splits_is_right(splits):
    for lengths in ([5000, 3, 0, 64], [1], [65, 4096]):
        cached = pages(lengths, 1, 128, scales="head")
        check_pages(queries(len(lengths), 1, 8, 128), cached, num_splits=splits)


@pytest.mark.parametrize("s_q", [1, 3, 16, 40])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 2), (71, 1)], ids=str)
def test_kv_fp8_queries_and_heads_share_tiles_rightly(heads, s_q):
    cached = pages([300, 64, 17, 513], heads[1], 128, 16, scales="head")
    check_pages(queries(4, s_q, heads[0], 128), cached, mask="causal_bottom_right")


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 5), (5, -1)], ids=str)
def test_kv_fp8_windows_skip_and_mask_rightly(window):
    cached = pages([1000, 90, 4, 300], 2, 64)
    for splits in (1, 3):
        given = {"window": window, "bottom_right": True, "num_splits": splits}
        check_pages(queries(4, 5, 4, 64), cached, **given)


@pytest.mark.parametrize(
    "layout", ["paged_kv_bshd_sbhd_sbhd", "paged_kv_sbhd_bshd_bshd", "paged_kv_sbhd_sbhd_sbhd"]
)
def test_kv_fp8_paged_layouts_are_right(layout):
    cached = pages([100, 200, 33], 2, 64, 32, scales="head")
    check_pages(queries(3, 2, 4, 64), cached, layout)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join((*c[0], c[1])))
def test_kv_fp8_scores_and_sinks_are_right(choice):
    for turn, splits in enumerate((1, 4)):
        given = {**arguments(choice, HEADS[0], turn), "num_splits": splits}
        cached = pages(LENGTHS, HEADS[1], 128, 16, scales="head")
        check_pages(queries(BATCH, 3, HEADS[0], 128), cached, **given)


@pytest.mark.parametrize("splits", [1, 3])
def test_kv_fp8_packed_queries_over_pages_are_right(splits):
    counts = [1, 40, 0, 7, 300]
    cached = pages([700, 64, 90, 7, 333], 2, 128, 32, scales="head")
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(oracle.DEVICE)
    q = oracle.randn(sum(counts), 8, 128, seed=3)
    out, aux = attngen.attention(
        q, cached.k, cached.v, layout="paged_kv_thd_bshd_bshd", page_table=cached.table,
        seqused_kv=cached.lengths, cu_seqlens_q=ends, num_splits=splits, **cached.scales,
        mask="causal_bottom_right", backend="cuda", return_lse=True,
    )  # fmt: skip
    k, v = (dense_of(x, cached.table, "bshd") for x in (cached.k, cached.v))
    first = 0
    for row, n in enumerate(counts):
        part, keys = slice(first, first + n), slice(0, int(cached.lengths[row]))
        scales = {name: x[row : row + 1] for name, x in cached.scales.items()}
        if n:
            wanted = truth(
                q[None, part], k[row : row + 1, keys], v[row : row + 1, keys], **scales,
                mask="causal_bottom_right",
            )  # fmt: skip
            oracle.check(out[None, part], aux.lse[None, :, part], wanted)
        first += n


@pytest.mark.parametrize("lengths", [(1, 4000), (1, 1), (3, 700), (16, 16), (64, 100)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_kv_fp8_dense_calls_are_right(lengths, layout):
    """Calls with more heads of a group than fill a tile are prompts, so keys are split as told."""
    for mask, kv in (("none", "e4m3"), ("causal_bottom_right", "e5m2")):
        for d, heads in ((64, (4, 4)), (128, (8, 2))):
            q, k, v = oracle.operands(3, *heads, *lengths, d, layout=layout)
            given = {"mask": mask, "layout": layout, **make_scales("head", 3, heads[1])}
            check_call(q, narrow(k, kv), narrow(v, kv), num_splits=2, **given)


def test_kv_fp8_dense_lengths_on_the_device_are_right():
    q, k, v = oracle.operands(3, 8, 2, 1, 500, 128)
    lengths = torch.tensor([0, 17, 500], dtype=torch.int32, device=oracle.DEVICE)
    for row, n in enumerate(lengths.tolist()):
        k[row, n:], v[row, n:] = math.nan, math.nan
    check_call(q, narrow(k, "e4m3"), narrow(v, "e4m3"), seqused_kv=lengths)


def test_kv_fp8_largest_score_is_scaled():
    q, k, v = oracle.operands(2, 4, 2, 1, 300, 64)
    scales = make_scales("head", 2, 2)
    k, v = narrow(k, "e4m3"), narrow(v, "e4m3")
    given = {"return_max_logit": True, "softcap": 2.0, **scales}
    _, aux = attngen.attention(q, k, v, **given, backend="cuda")
    _, wanted = attngen.attention(q, k, v, **given, backend="reference")
    torch.testing.assert_close(aux.max_logit, wanted.max_logit, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_kv_fp8_every_number_is_widened_exactly(kv, dtype):
    """One key a sequence: the output is its value, the LSE its score; all numbers in turn."""
    numbers = torch.arange(256, dtype=torch.uint8, device=oracle.DEVICE).view(DTYPES[kv])
    numbers = numbers[numbers.float().isfinite()]
    v = numbers.reshape(-1, 1, 1, 1).expand(-1, 1, 1, 64).contiguous()
    q = torch.zeros(len(v), 1, 1, 64, dtype=DTYPES[dtype], device=oracle.DEVICE)
    out = attngen.attention(q, torch.zeros_like(v), v, backend="cuda")
    assert torch.equal(out.float(), v.float())
    q[..., 0] = 1
    given = {"softmax_scale": 1.0, "backend": "cuda", "return_lse": True}
    _, aux = attngen.attention(q, v, v, **given)
    wanted = v[:, 0, 0, 0].float()
    torch.testing.assert_close(aux.lse.flatten(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_kv_fp8_result_does_not_depend_on_the_batch(splits):
    cached = pages([4000, 70, 1, 2500, 0, 640], 2, 128, scales="head")
    q = queries(6, 2, 8, 128)

    def call(rows: list[int]) -> Tensor:
        scales = {name: x[rows] for name, x in cached.scales.items()}
        return attngen.attention(
            q[rows], cached.k, cached.v, layout=PAGED, page_table=cached.table[rows],
            seqused_kv=cached.lengths[rows], num_splits=splits, backend="cuda", **scales,
        )  # fmt: skip

    whole = call([*range(6)])
    for rows in ([3], [0, 5], [5, 4, 3, 2, 1, 0]):
        assert torch.equal(call(rows), whole[rows])


@pytest.mark.device
def test_kv_fp8_graph_replay_follows_changed_lengths_and_scales():
    cached, q = pages([900, 900, 900], 2, 128, scales="head"), queries(3, 1, 8, 128)
    lengths = cached.lengths.clone()
    scales = {name: x.clone() for name, x in cached.scales.items()}

    def call() -> Tensor:
        return attngen.attention(
            q, cached.k, cached.v, layout=PAGED, page_table=cached.table, seqused_kv=lengths,
            backend="cuda", **scales,
        )  # fmt: skip

    first = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for number in range(3):
        lengths.copy_(torch.tensor([number * 200, 900 - number, 1 + number], dtype=torch.int32))
        scales["descale_v"].mul_(2.0)
        graph.replay()
        assert torch.equal(out, call()) and not torch.equal(out, first)


def test_kv_fp8_gradients_are_refused():
    q, k, v = oracle.operands(1, 2, 2, 1, 64, 64)
    k, v = narrow(k, "e4m3"), narrow(v, "e4m3")
    with pytest.raises(attngen.SpecError, match="no backward"):
        attngen.attention(q.requires_grad_(), k, v, backend="cuda")
