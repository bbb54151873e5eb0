"""Appends by the kernel: each equals the definition to the bit, and leaves the rest of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.spec.attention_spec import dtype_name

from . import oracle

pytestmark = pytest.mark.gpu
BEFORE, NEW = (0, 37, 5, 12), (3, 1, 0, 6)
ROOM = 48


@dataclass(frozen=True)
class Case:
    """An append. cache_dtype: None for that of the tokens; width: columns that turn; table: pages
    of so many rows, or, of 0, rows of one sequence each; pad: columns between heads."""

    name: str
    layout: str = "bshd"
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    heads: int = 2
    d: int = 64
    d_v: int = 64
    table: int = 16
    counted: bool = True
    by_ends: bool = False
    width: int = 0
    interleaved: bool = False
    wide: bool = True
    queries: int = 0
    at_start: bool = False
    scales: str = ""
    pad: int = 0

    def __str__(self) -> str:
        return f"append-{self.name}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernel that serves the case."""
        dims: dict[str, Any] = {"head_dim": self.d, "head_dim_v": self.d_v}
        kv_dtype = None if self.cache_dtype is None else dtype_name(self.cache_dtype)
        dtype = dtype_name(self.dtype)
        return attngen.AttentionSpec(**dims, dtype=dtype, kv_dtype=kv_dtype, directions=("append",))


CASES = [
    Case("pages"),
    Case("rows-sbhd", layout="sbhd", table=0, d_v=32, dtype=torch.float16),
    Case("packed", layout="thd", by_ends=True, heads=3),
    Case("halves", width=64, queries=4, layout="bhsd", wide=False),
    Case("pairs-of-some", layout="thd", width=32, interleaved=True, queries=2, at_start=True),
    Case("narrow", cache_dtype=torch.float8_e4m3fn, width=64, scales="head"),
    Case("narrow-e5m2", cache_dtype=torch.float8_e5m2, layout="thd", scales="one", counted=True),
    Case("eight-bits", dtype=torch.float8_e4m3fn, d=48, counted=False, by_ends=True),
    Case("odd-heads", d=33, d_v=31, width=16, queries=1, table=0, counted=False),
    Case("odd-strides", pad=3, width=32, interleaved=True, cache_dtype=torch.float8_e4m3fn, d=48),
    Case("wide-heads", layout="thd", d=576, d_v=512, heads=1, width=64, dtype=torch.float16),
]


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (4 * oracle.randn(*shape, seed=seed)).to(dtype)


def made(case: Case) -> dict[str, Any]:
    """Arguments of a call, with NaN where there is no token."""
    b, s, h = len(NEW), max(NEW), case.heads
    new, before = (torch.tensor(x, dtype=torch.int32) for x in (NEW, BEFORE))
    counts = new if case.counted or case.layout == "thd" else torch.full_like(new, s)
    given: dict[str, Any] = {"layout": case.layout}
    for name, heads, dim in (("k", h, case.d), ("v", h, case.d_v), ("q", case.queries, case.d)):
        if not heads:
            continue
        x = numbers(b, s, heads, dim + case.pad, dtype=case.dtype, seed=len(given))[..., :dim]
        if case.layout == "thd":
            x = torch.cat([*(row[:n] for row, n in zip(x, NEW, strict=True)), x[0, :2]])
        else:
            x = x.permute(["bshd".index(axis) for axis in case.layout])
        given[name] = x
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(oracle.DEVICE)
    if case.counted or case.layout == "thd":
        given["cu_seqlens"] = ends
    if case.by_ends:
        every = torch.nn.functional.pad((before + counts).cumsum(0), (1, 0))
        given["cu_seqlens_all"] = every.int().to(oracle.DEVICE)
    else:
        given["lengths"] = before.to(oracle.DEVICE)
    pages, rows = (5, ROOM) if not case.table else (14, case.table)
    for name, dim in (("k_cache", case.d), ("v_cache", case.d_v)):
        x = numbers(pages, rows, h, dim + case.pad, dtype=case.cache_dtype or case.dtype, seed=7)
        given[name] = x[..., :dim]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).int()
    columns = ROOM // rows
    table = order[: b * columns].reshape(b, columns)
    given["page_table"] = table.to(oracle.DEVICE)
    if case.width:
        dtype = torch.float32 if case.wide else case.dtype
        for name, seed in (("rotary_cos", 21), ("rotary_sin", 22)):
            given[name] = oracle.randn(ROOM, case.width // 2, seed=seed).to(dtype)
    given |= {"rotary_interleaved": case.interleaved, "rotary_at_start": case.at_start}
    if case.scales:
        shape = (1,) if case.scales == "one" else (b, h)
        for name, seed in (("scale_k", 31), ("scale_v", 32)):
            given[name] = 20 * oracle.randn(*shape, seed=seed).float().abs()
    return given


def appended(given: dict[str, Any], backend: str) -> list[Tensor]:
    """The caches and the turned queries."""
    caches = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    turned = attngen.append_kv(**{**given, **caches}, backend=backend)
    return [*caches.values(), *([] if turned is None else [turned])]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_the_definition(case: Case) -> None:
    with attngen.trace() as trace:
        check(case, oracle.DEVICE)
    assert [problem.direction for problem, _ in trace.variants] == ["append"]


def test_graph_that_saved_a_cache_is_told_of_its_change() -> None:
    given = made(CASES[0])
    loss = (given["k_cache"] * torch.ones(1, device=oracle.DEVICE, requires_grad=True)).sum()
    attngen.append_kv(**given, backend="cuda")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        attngen.append_kv(**made(CASES[0]), backend="cuda")


def check(case: Case, device: torch.device) -> None:
    """Assert that the kernel's caches and queries are the reference's, to the bit."""
    given = made(case)
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    found = [x.to(oracle.DEVICE) for x in appended(there, "cuda")]
    expected = appended(given, "reference")
    for got, wanted, before in zip(found, expected, ("k_cache", "v_cache", "q"), strict=False):
        if before == "q":  # rows of no token are as they were
            count = sum(NEW) if case.layout == "thd" else None
            got, wanted = got[:count], wanted[:count]
            if case.counted and case.layout != "thd":
                at = [case.layout.index(axis) for axis in "bshd"]
                rows = zip(got.permute(at), wanted.permute(at), NEW, strict=True)
                assert all(torch.equal(bits(x[:n]), bits(y[:n])) for x, y, n in rows)
                continue
        else:
            assert not torch.equal(bits(wanted), bits(given[before]))
        assert torch.equal(bits(got), bits(wanted))


def test_places_that_lead_nowhere_are_left_out() -> None:
    given = made(replace(CASES[0], counted=False))
    given["page_table"] = given["page_table"].clone()
    given["page_table"][0, 0], given["page_table"][1, 2] = 99, -1
    given["lengths"] = torch.tensor([0, 37, 1 << 30, -2], dtype=torch.int32).to(oracle.DEVICE)
    for got, wanted in zip(appended(given, "cuda"), appended(given, "reference"), strict=True):
        assert torch.equal(bits(got), bits(wanted))


@pytest.mark.device
def test_append_is_captured() -> None:
    given = made(CASES[3])
    wanted = appended(given, "reference")
    appended(given, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = attngen.append_kv(**given, backend="cuda")
    graph.replay()
    assert turned is not None
    for got, expected in zip((given["k_cache"], given["v_cache"]), wanted, strict=False):
        assert torch.equal(bits(got), bits(expected))
