"""Few queries a sequence beside ALiBi, softcap, sinks, windows and the largest score."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import attngen
from attngen import AttentionSpec

from . import oracle, variants
from .test_decode import PAGED, Cache, cache, check, queries

pytestmark = pytest.mark.gpu
BATCH, HEADS = 4, (8, 2)
LENGTHS = [700, 0, 65, 1500]

# Names of features, and under which mask; the values of a call are in `arguments`.
CHOICES: list[tuple[tuple[str, ...], str]] = [
    (("softcap",), "none"), (("alibi",), "none"), (("alibi",), "causal"), (("off_by_one",), "none"),
    (("learnable",), "causal"), (("max_logit",), "none"), (("window", "learnable"), "none"),
    (("window", "softcap"), "causal"), (("window", "alibi", "off_by_one"), "none"),
    (("window", "softcap", "alibi", "learnable", "max_logit"), "causal"),
    (("softcap", "alibi", "learnable", "max_logit"), "none"),
]  # fmt: skip
EACH = pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join((*c[0], c[1])))


def spec_of(
    choice: tuple[tuple[str, ...], str], d: int = 128, layout: str = PAGED
) -> AttentionSpec:
    names, mask = choice
    softmax = next((name for name in ("off_by_one", "learnable") if name in names), "vanilla")
    return AttentionSpec(
        d, kv_dtype="bf16", out_dtype="bf16", layout=layout, mask=mask, decode=True,
        window="window" in names, softcap="softcap" in names, alibi="alibi" in names,
        softmax=softmax, return_max_logit="max_logit" in names,
    )  # fmt: skip


KERNELS = [spec_of(choice, d) for choice in CHOICES for d in (64, 128)]
KERNELS += [spec_of(choice, d, "bshd") for choice in CHOICES[-2:] for d in (64, 256)]
KERNELS += [dataclasses.replace(spec_of(choice, 64), layout="paged_kv_thd_bshd_bshd")
            for choice in CHOICES[3:5]]  # fmt: skip


def arguments(choice: tuple[tuple[str, ...], str], heads: int, turn: int) -> dict[str, Any]:
    """Keyword arguments of a call, whose slopes, cap and window turn."""
    names, mask = choice
    found: dict[str, Any] = {"mask": mask, "bottom_right": True}
    if "window" in names:
        found["window"] = ((100, 0), (0, 7), (64, -1))[turn % 3]
    if "softcap" in names:
        found["softcap"] = (30.0, 1.5)[turn % 2]
    if "alibi" in names:
        slopes = 0.5 * oracle.randn(heads, BATCH, dtype=torch.float32, seed=8).T
        found["alibi_slopes"] = (True, slopes[0].contiguous(), slopes)[turn % 3]
    if "off_by_one" in names:
        found["softmax"] = "off_by_one"
    if "learnable" in names:
        sink = torch.linspace(-3, 6, heads, device=oracle.DEVICE)
        found |= {"softmax": "learnable", "sink": sink}
    return found


def check_all(choice: Any, q: torch.Tensor, pages: Cache, turn: int, splits: int | None) -> None:
    """The float64 rule for everything that a call returns."""
    given = arguments(choice, q.shape[2], turn)
    check(q, pages, num_splits=splits, **given)
    if "max_logit" not in choice[0]:
        return
    named = {"layout": PAGED, "seqused_kv": pages.lengths, **given}
    k, v, table = pages.k, pages.v, pages.table
    _, aux = attngen.attention(
        q, k, v, **named, page_table=table, return_max_logit=True, num_splits=splits,
        backend="cuda",
    )  # fmt: skip
    named["page_table"] = table.clamp(max=k.shape[0] - 1)
    variants.check_max_logit(aux.max_logit, q, k, v, named, False)


@EACH
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("s_q", [1, 5])
def test_decode_scores_over_pages_are_right(choice, s_q, splits):
    turn = s_q + (splits or 0)
    for d in (64, 128):
        q, pages = queries(BATCH, s_q, HEADS[0], d), cache(LENGTHS, HEADS[1], d)
        check_all(choice, q, pages, turn, splits)


@EACH
@pytest.mark.parametrize("heads", [(6, 2), (71, 1), (3, 3)], ids=str)
def test_decode_heads_of_a_tile_have_their_own_slopes_and_sinks(choice, heads):
    pages = cache(LENGTHS, heads[1], 64, 16)
    for turn, splits in enumerate((1, 4)):
        check_all(choice, queries(BATCH, 3, heads[0], 64), pages, turn, splits)


@pytest.mark.slow
@pytest.mark.parametrize("s_q", [1, 7])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_decode_scores_of_dense_calls_are_right(layout, s_q):
    for turn, choice in enumerate(CHOICES):
        d = (64, 256)[turn % 2]
        tensors = oracle.operands(BATCH, *HEADS, s_q, 900, d, layout=layout)
        oracle.check_call(*tensors, layout=layout, **arguments(choice, HEADS[0], turn))


@pytest.mark.parametrize("choice", CHOICES[3:5], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_rows_of_no_sequence_have_no_sink(choice, splits):
    """Their LSE is -inf; that of queries which see no key is the sink."""
    pages, turn = cache([700, 0, 90, 333], 2, 64, 32), 0
    given = {**arguments(choice, 8, turn), "num_splits": splits}
    q = queries(4, 5, 8, 64)
    used = torch.tensor([5, 2, 0, 1], dtype=torch.int32, device=oracle.DEVICE)
    for row, n in enumerate(used.tolist()):
        q[row, n:] = math.nan
    check(q, pages, seqused_q=used, **given)
    ends = torch.tensor([0, 1, 41, 41, 48], dtype=torch.int32, device=oracle.DEVICE)
    offsets = torch.tensor([4, 8, 48, 53, 60], dtype=torch.int32, device=oracle.DEVICE)
    q = oracle.randn(66, 8, 64, seed=3)
    check(
        q, pages, "paged_kv_thd_bshd_bshd", cu_seqlens_q=ends, cu_seqlens_q_padded=offsets, **given
    )


def test_decode_sink_of_any_size_leaves_no_nan():
    pages, q = cache([600, 3], 2, 128), queries(2, 1, 4, 128)
    named = {"layout": PAGED, "page_table": pages.table, "seqused_kv": pages.lengths}
    for splits in (1, 3):
        call = {**named, "num_splits": splits, "backend": "cuda", "return_lse": True}
        plain, plain_aux = attngen.attention(q, pages.k, pages.v, **call)
        for value in (-math.inf, -1e30, 200.0, 1e30):
            sink = torch.full((4,), value, device=oracle.DEVICE)
            out, aux = attngen.attention(
                q, pages.k, pages.v, softmax="learnable", sink=sink, mask="causal",
                bottom_right=True, **call,
            )  # fmt: skip
            if value < 0:
                assert torch.equal(out, plain)
                torch.testing.assert_close(aux.lse, plain_aux.lse, rtol=1e-6, atol=1e-6)
            else:
                assert out.abs().max() < 1e-30
                assert torch.equal(aux.lse, sink[0].expand_as(aux.lse))
