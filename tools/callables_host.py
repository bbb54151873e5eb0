"""Times the host beside callables: microseconds a call, and of recognising one; first calls."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.bench.timing import host_interleaved
from attngen.frontends.pytorch.callables import calls as callables
from tools.callable_cases import At, relative, tree, window

CALLS, ROUNDS = 200, 9
SIZES = At(1, 4, 256, "cuda")
RECOGNISED = "recognised"


def host_rows() -> Iterator[dict[str, Any]]:
    """Rows of calls without gradients of [1, 256, 4, 64], and of what recognises their functions,
    microseconds; then of first calls, milliseconds. Every figure is a median."""
    q, k, v = (SIZES.randn(1, SIZES.length, SIZES.heads, 64, dtype=torch.bfloat16) for _ in "qkv")
    attend = partial(attngen.attention, q, k, v, backend="cuda")
    score, mask, band = (make(SIZES) for make in (relative, tree, window))
    schedule = attngen.Schedule()
    bias = SIZES.randn(SIZES.length, SIZES.length, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "full": attend,
        "window": partial(attend, mask="causal", window=(32, 0)),
        "bias": partial(attend, bias=bias),
        "attn_mask": partial(attend, attn_mask=bias > 0),
        "score_mod": partial(attend, score_mod=score.score_mod),
        "mask_mod": partial(attend, mask_mod=mask.mask_mod),
        "mask_mod with schedule": partial(attend, mask_mod=mask.mask_mod, schedule=schedule),
        "mask_mod of a window": partial(attend, mask_mod=band.mask_mod),
        f"{RECOGNISED}: score_mod": partial(callables._find, "score_mod", score.score_mod),
        f"{RECOGNISED}: mask_mod": partial(callables._find, "mask_mod", mask.mask_mod),
    }
    with torch.no_grad():
        for name, us in host_interleaved(calls, ROUNDS, CALLS).items():
            yield {"case": name, "direction": "host", "us": round(us, 2)}
        for name, ms in _first_calls(attend).items():
            yield {"case": name, "direction": "first call", "ms": round(ms, 1)}


def _first_calls(attend: Callable[..., Tensor]) -> dict[str, float]:
    """Milliseconds of calls with programs like none before, with an empty cache of kernels."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as empty:
        os.environ["ATTNGEN_CACHE_DIR"] = empty
        for number in range(2, 5):  # exponents and divisors are parts of programs
            mods: dict[str, Any] = {
                "score_mod": lambda s, b, h, i, j, n=number: s - (i - j) ** n * 1e-9,
                "mask_mod": lambda b, h, i, j, n=number: i % n >= j % (n + 7),
            }
            for name, mod in mods.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                attend(**{name: mod})
                torch.cuda.synchronize()
                found.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(each) for name, each in found.items()}
