"""Prompts in 8 bits by products of warps beside 16 bits, as tools/mma_sync_speed.py times them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import attngen
from attngen import AttentionSpec
from attngen.bench import workloads
from attngen.bench.timing import time_interleaved
from attngen.errors import MeasureError
from tests.support.caches import kernels_of

ARCH = "sm_90"
E4M3 = torch.float8_e4m3fn
IN_16, KV_8, IN_8, BY_TOKEN = "bf16", "K and V in e4m3", "e4m3", "e4m3, scales a token"
TOLERANCE = {KV_8: 0.02, IN_8: 0.2, BY_TOKEN: 0.2}  # of the output, root mean squares
HEADS = 16
CASES = tuple(
    workloads.Case(1, 16384, HEADS, HEADS, d, d, causal)
    for d in (64, 128)
    for causal in (False, True)
)


def specs() -> Iterator[tuple[AttentionSpec, str]]:
    """The kernels that are timed, and their targets."""
    for case in CASES:
        made = partial(AttentionSpec, case.head_dim, mask="causal" if case.causal else "none")
        yield made(), ARCH
        yield made(kv_dtype="e4m3", out_dtype="bf16"), ARCH
        for scaling in ("tensor", "token"):
            yield made(dtype="e4m3", out_dtype="bf16", scaling=scaling), ARCH


def calls_of(case: workloads.Case) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls of `attention` with numbers that 8 bits hold, by how they are stored."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (case.batch, case.length, case.heads_q, case.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(E4M3) for _ in "qkv")
    attend: Any = partial(
        attngen.attention, mask="causal" if case.causal else "none", backend="cuda"
    )
    wide = [x.to(torch.bfloat16) for x in (q, k, v)]
    ones = torch.ones(case.batch, case.heads_q, case.length, device="cuda")
    whole = {f"descale_{name}": ones[0, 0, :1] for name in "qkv"}
    tokens = {f"descale_{name}": ones for name in "qkv"}
    of_kv = {name: whole[name] for name in ("descale_k", "descale_v")}
    eight = partial(attend, q, k, v, out_dtype=torch.bfloat16)
    return {
        IN_16: partial(attend, *wide),
        KV_8: partial(attend, wide[0], k, v, **of_kv),
        IN_8: partial(eight, **whole),
        BY_TOKEN: partial(eight, **tokens),
    }


def narrow_row(case: workloads.Case, rounds: int, budget_ms: float) -> dict[str, Any]:
    """One prompt in each format. Raises: MeasureError where one is far from that in 16 bits."""
    with torch.no_grad(), kernels_of(ARCH):
        calls = calls_of(case)
        wanted = calls[IN_16]().float()
        size = float(wanted.square().mean().sqrt())
        for name, most in TOLERANCE.items():
            error = float((calls[name]().float() - wanted).square().mean().sqrt()) / size
            if not error <= most:
                raise MeasureError(f"{name}: its output differs by {error:.2g} of that in 16 bits")
        ms = time_interleaved(calls, rounds, budget_ms)
    flops = workloads.FLOPS["fwd"](case)
    return {
        "direction": "narrow",
        "case": case.name,
        "ms": {name: round(each, 4) for name, each in ms.items()},
        "tflops": {name: round(flops / each / 1e9, 1) for name, each in ms.items()},
        "ratio": round(ms[IN_16] / ms[KV_8], 3),
        "ratios": {name: round(ms[IN_16] / each, 3) for name, each in ms.items()},
    }
