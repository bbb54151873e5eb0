"""Few queries a sequence over packed keys that are split, and dense ones behind left padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen

from . import oracle

pytestmark = pytest.mark.gpu
COUNTS, LENGTHS = [1, 5, 0, 3, 1], [700, 64, 90, 0, 333]  # of queries, of keys


def ends_of(lengths: list[int], gaps: int) -> tuple[Tensor, Tensor, int]:
    """Cumulative lengths, where sequences begin that have so many rows before each, and rows."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    starts = ends + gaps * torch.arange(1, len(lengths) + 2, dtype=torch.int32)
    return ends.to(oracle.DEVICE), starts.to(oracle.DEVICE), int(starts[-1]) + gaps


def packed(gaps: int = 7) -> tuple[list[Tensor], dict[str, Any]]:
    """Operands whose rows of no sequence are NaN, and where sequences lie."""
    made, given = list[Tensor](), dict[str, Any]()
    for lengths, side, heads in ((COUNTS, "q", 8), (LENGTHS, "kv", 2), (LENGTHS, "kv", 2)):
        ends, starts, rows = ends_of(lengths, gaps)
        given |= {f"cu_seqlens_{side}": ends, f"cu_seqlens_{side}_padded": starts}
        x = torch.full((rows, heads, 128), math.nan, dtype=torch.bfloat16, device=oracle.DEVICE)
        for n, (start, count) in enumerate(zip(starts.tolist(), lengths, strict=False)):
            x[start : start + count] = oracle.randn(count, heads, 128, seed=n + len(made))
        made.append(x)
    return made, given


@pytest.mark.parametrize("splits", [1, 3, -1])
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
def test_packed_keys_are_split(splits: int, mask: str) -> None:
    operands, given = packed()
    given |= {"layout": "thd", "mask": mask, "alibi_slopes": True}
    with attngen.trace() as trace, oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            *operands, **given, num_splits=splits, return_lse=True, backend="cuda"
        )
    ((problem, _),) = trace.variants
    assert problem.decode and problem.kv_seq == "packed"
    oracle.check(out, aux.lse, oracle.truth(*operands, **given), "thd")


def test_packed_keys_of_8_bits_are_split() -> None:
    (q, *kv), given = packed()
    given |= {"layout": "thd", "mask": "causal_bottom_right"}
    narrow = [x.to(torch.float8_e4m3fn) for x in kv]
    scale = torch.tensor([0.5], device=oracle.DEVICE)
    out, aux = attngen.attention(
        q, *narrow, **given, descale_k=scale, descale_v=scale, num_splits=3, return_lse=True,
        backend="cuda",
    )  # fmt: skip
    wide = ((x.float() * scale).bfloat16() for x in narrow)  # exactly
    oracle.check(out, aux.lse, oracle.truth(q, *wide, **given), "thd")


def test_dense_keys_of_packed_queries_are_split() -> None:
    (q, _, _), given = packed()
    given = {name: x for name, x in given.items() if "kv" not in name}
    k, v = (oracle.randn(len(LENGTHS), 700, 2, 128, seed=n) for n in (1, 2))
    given["seqused_kv"] = torch.tensor(LENGTHS, dtype=torch.int32, device=oracle.DEVICE)
    given |= {"layout": "thd_bshd_bshd", "mask": "causal_bottom_right"}
    out, aux = attngen.attention(q, k, v, **given, num_splits=3, return_lse=True, backend="cuda")
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **given), "thd_bshd_bshd")


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_keys_behind_left_padding_are_split(layout: str) -> None:
    """Where sequences of a cache begin behind its first row, and queries too or not."""
    order = ["bshd".index(axis) for axis in layout]
    shapes = ((3, 5, 8, 64), (3, 400, 2, 64), (3, 400, 2, 64))
    q, k, v = (oracle.randn(*shape, seed=n) for n, shape in enumerate(shapes))
    starts, ends, firsts = [70, 0, 129], [400, 131, 130], [2, 0, 4]
    for x in (k, v):
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            x[b, :start] = x[b, end:] = math.nan
    given: dict[str, Any] = {
        name: torch.tensor(x, dtype=torch.int32, device=oracle.DEVICE)
        for name, x in (("seqstart_kv", starts), ("seqused_kv", ends), ("seqstart_q", firsts))
    }
    for names in (("seqstart_kv", "seqused_kv"), tuple(given)):
        some = {name: given[name] for name in names}
        some |= {"layout": layout, "mask": "causal_bottom_right", "return_lse": True}
        results = []
        for backend in ("cuda", "reference"):
            with attngen.trace() as trace:
                operands = [x.permute(order).contiguous() for x in (q, k, v)]
                results.append(attngen.attention(*operands, **some, backend=backend))
            assert [problem.decode for problem, _ in trace.variants] == [True] * (backend == "cuda")
        (out, aux), (wanted, of_wanted) = results
        assert torch.equal(aux.lse.isfinite(), of_wanted.lse.isfinite())
        seen = aux.lse.isfinite()
        assert (aux.lse - of_wanted.lse)[seen].abs().max() <= 1e-3
        assert (out - wanted).abs().max() <= 2e-2 * wanted.abs().max()
