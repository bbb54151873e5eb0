"""Softcaps: low scores are weighed another way than large ones, which a block may hold or not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec

from . import oracle, test_decode
from .cases import Case

pytestmark = pytest.mark.gpu
PLAIN = Case(128, 128, mask="causal", lengths=(300, 300), heads=(2, 4, 2))
CASES = [
    Case(d, d_v, dtype, mask, heads=(2, 4, 2), lengths=(300, 1400))
    for d, d_v, dtype in (
        (128, 128, "bf16"),
        (64, 64, "fp16"),
        (96, 96, "bf16"),
        (192, 128, "fp16"),
        (256, 256, "bf16"),
    )
    for mask in ("none", "causal_bottom_right")
]
# So many queries have the usual kernel, not the one for short sequences.
CASES += [
    Case(128, 128, dtype, "causal_bottom_right", heads=(1, 1, 1), lengths=(1060, 1400))
    for dtype in ("bf16", "fp16")
]
WINDOW = dataclasses.replace(CASES[1], window=(700, 0))
KERNELS = [
    dataclasses.replace(case.spec, softcap=True, directions=("fwd",)) for case in (*CASES, WINDOW)
]
KERNELS += [
    AttentionSpec(
        d, kv_dtype="bf16", out_dtype="bf16", layout=test_decode.PAGED, mask="causal", softcap=True
    )
    for d in (64, 128)
]
KERNELS.append(
    AttentionSpec(128, layout="thd_thd_thd", mask="causal", softcap=True, directions=("fwd",))
)


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("softcap", [0.5, 20.0, 50.0])
def test_small_and_large_scores_are_right(softcap, factor):
    """Blocks whose scores are far below the cap take a cheaper way than others."""
    q, k, v = PLAIN.operands()
    q = (q.float() * factor).to(q.dtype)
    arguments = {"mask": "causal", "softcap": softcap}
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **arguments))


@pytest.mark.parametrize("softcap", [12.0, 30.0, 50.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_that_grow_and_turn_are_right(case, softcap):
    """Keys are visited from the last on: maxima grow, those of some rows below 0, while scores of
    others fall far below the cap's opposite."""
    q, k, v = case.operands()
    place = torch.linspace(0, 1, k.shape[1], device=k.device)[None, :, None, None]
    turn = torch.where((place * 12).floor() % 3 == 1, -1, 1)
    k = (k.float().abs() * turn * (6 - 5.95 * place)).to(k.dtype)
    rows = torch.arange(q.shape[1], device=q.device)[None, :, None, None] % 3
    q = torch.where(rows == 0, q.abs(), torch.where(rows == 1, -q.abs(), q))
    arguments = {**case.arguments, "softcap": softcap}
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **arguments))


def rare(k: Tensor) -> Tensor:
    """Some keys, blocks apart, with scores up to a few caps, of both signs."""
    k[:, 37::389] *= 12
    return k


def rising(k: Tensor) -> Tensor:
    """Keys are visited from the last on: all from some block on have large scores."""
    k[:, : k.shape[1] // 2] *= 6
    return k


def huge(k: Tensor) -> Tensor:
    """Scores of thousands, of which a polynomial knows nothing."""
    k[:, 200:202] *= 1000
    k[:, 650] *= -1000
    return k


def level(k: Tensor) -> Tensor:
    """Repeat one key everywhere: rows without a score above 0, and rows without one below."""
    return k[:, :1].expand_as(k).contiguous() * 1.5


KINDS = {"rare": rare, "rising": rising, "huge": huge, "level": level}


@pytest.mark.parametrize("softcap", [30.0, 50.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [*CASES, WINDOW], ids=str)
def test_scores_above_the_low_ones_are_right(case, kind, softcap):
    q, k, v = case.operands()
    k = KINDS[kind](k)
    arguments = {**case.arguments, "softcap": softcap}
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **arguments))


@pytest.mark.parametrize("softcap", [30.0, 50.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_low_scores_of_which_many_are_near_the_large_ones_are_right(case, softcap):
    """None of a block is too large, but their weights together are as much as that of one."""
    q, k, v = case.operands()
    q[..., 0] = q.shape[-1] ** 0.5
    k[..., 0] = 0.34 * softcap
    arguments = {**case.arguments, "softcap": softcap}
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **arguments))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_scores_above_the_low_ones_over_pages_are_right(d, page, kind):
    """Keys that a warp reads itself lie as pages have them."""
    pages = test_decode.cache([1500, 0, 128, 700], 2, d, page)
    every = pages.k.view(1, -1, *pages.k.shape[2:])
    if kind == "level":
        every = torch.where(every.isnan(), every, every[:, :1].nan_to_num())
    else:
        every = KINDS[kind](every)
    pages = pages._replace(k=every.view_as(pages.k))
    q = test_decode.queries(4, 200, 4, d)
    test_decode.check(q, pages, mask="causal_bottom_right", softcap=30.0)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_above_the_low_ones_of_packed_tokens_are_right(kind):
    case = CASES[1]
    q, k, v = case.operands()
    k = KINDS[kind](k)
    arguments = {"mask": case.mask, "softcap": 30.0}
    expected = oracle.truth(q, k, v, **arguments)
    ends = [torch.arange(3, dtype=torch.int32, device=oracle.DEVICE) * n for n in case.lengths]
    packed = {
        "layout": "thd_thd_thd", "cu_seqlens_q": ends[0], "cu_seqlens_kv": ends[1],
        "max_seqlen_q": case.lengths[0], "max_seqlen_kv": case.lengths[1],
    }  # fmt: skip
    out = attngen.attention(
        *(x.flatten(0, 1) for x in (q, k, v)), **arguments, **packed, backend="cuda"
    )
    oracle.check(out.view_as(expected.out), None, expected)
