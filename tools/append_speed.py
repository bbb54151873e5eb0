"""Times appends to a cache beside a copy of as many bytes, as a short table.

    python tools/append_speed.py

Caches of pages, of 16 rows, in any order; a step of decoding and a prompt, dense and packed, plain,
rotated, and to 8 bits. The copy is PyTorch's, of contiguous tensors that hold together what an
append reads and writes. Interleaved rounds, medians.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen.bench.timing import time_interleaved  # noqa: E402

PAGE, ROUNDS, BUDGET_MS = 16, 7, 20.0
CALLS = 20  # of a graph, so that its own launch hardly counts


class Case(NamedTuple):
    """A step: sequences of so many new tokens behind `before`, in a layout."""

    name: str
    sequences: int
    new: int
    layout: str = "bshd"
    heads: int = 8
    dim: int = 128
    before: int = 1000
    interleaved: bool | None = None
    dtype: torch.dtype = torch.bfloat16


CASES = [
    Case("decode b128", 128, 1),
    Case("decode b1024", 1024, 1),
    Case("decode b1024 thd", 1024, 1, "thd"),
    Case("prompt 8 x 2k", 8, 2048),
    Case("prompt 8 x 2k sbhd", 8, 2048, "sbhd"),
    Case("prompt 8 x 2k thd", 8, 2048, "thd"),
    Case("prompt 8 x 2k, 1 head of 64", 8, 2048, heads=1, dim=64),
    Case("prompt 8 x 2k rotary", 8, 2048, interleaved=False),
    Case("prompt 8 x 2k rotary pairs", 8, 2048, interleaved=True),
    Case("prompt 8 x 2k e4m3", 8, 2048, dtype=torch.float8_e4m3fn),
    Case("prompt 8 x 2k e4m3 rotary", 8, 2048, interleaved=False, dtype=torch.float8_e4m3fn),
    Case("prompt 8 x 2k e4m3 rotary pairs", 8, 2048, interleaved=True, dtype=torch.float8_e4m3fn),
]


def arguments(case: Case) -> dict[str, Any]:
    """Arguments of a call."""
    b, room = case.sequences, -(-(case.before + case.new) // PAGE)
    sizes = {"b": b, "s": case.new, "t": b * case.new, "h": case.heads, "d": case.dim}
    shape = [sizes[axis] for axis in case.layout]
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in "kv")
    pages = (b * room, PAGE, case.heads, case.dim)
    caches = [torch.zeros(pages, device="cuda", dtype=torch.bfloat16).to(case.dtype) for _ in "kv"]
    table = torch.randperm(b * room, device="cuda").int().reshape(b, room)
    given: dict[str, Any] = dict(zip(("k_cache", "v_cache"), caches, strict=True))
    given |= {"k": k, "v": v, "layout": case.layout, "page_table": table, "backend": "cuda"}
    given["lengths"] = torch.full((b,), case.before, dtype=torch.int32, device="cuda")
    if case.layout == "thd":
        given["cu_seqlens"] = torch.arange(b + 1, dtype=torch.int32, device="cuda") * case.new
    if case.interleaved is not None:
        angles = (case.before + case.new, case.dim // 2)
        for name in ("rotary_cos", "rotary_sin"):
            given[name] = torch.randn(angles, device="cuda")
        given["rotary_interleaved"] = case.interleaved
    return given


def copy_of(given: dict[str, Any]) -> partial[Tensor]:
    """A copy that reads and writes as many bytes together."""
    new, cache = given["k"], given["k_cache"]
    moved = 2 * new.numel() * (new.element_size() + cache.element_size())
    source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def captured(call: Any) -> Any:
    """Calls of a graph, in which the host has no part."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def main() -> None:
    """Print a row a case: microseconds of both, GB/s of the append, and its share of the copy's."""
    print(f"{'case':34}{'append us':>10}{'copy us':>10}{'GB/s':>8}{'of copy':>9}")
    for case in CASES:
        given = arguments(case)
        append = partial(attngen.append_kv, **given)
        calls = {"append": captured(append), "copy": captured(copy_of(given))}
        times = time_interleaved(calls, ROUNDS, BUDGET_MS)
        ours, theirs = (1000 * times[name] / CALLS for name in ("append", "copy"))
        new, cache = given["k"], given["k_cache"]
        moved = 2 * new.numel() * (new.element_size() + cache.element_size())
        rate = moved / ours / 1000
        print(f"{case.name:34}{ours:10.2f}{theirs:10.2f}{rate:8.0f}{theirs / ours:9.2f}")


if __name__ == "__main__":
    main()
