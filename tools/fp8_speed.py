"""Times the FP8 forward beside cuDNN's and the 16-bit one, as JSON.

    python tools/fp8_speed.py -o docs/results/fp8.json

e4m3 operands of standard normal numbers, one scale a tensor; interleaved rounds, medians, each at
the clocks that its own power allows. cuDNN through cudnn-frontend, where that is installed; its
output is e4m3, the only one that it has on Hopper.
docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen.bench.peers import describe  # noqa: E402
from attngen.bench.timing import Call as Timed  # noqa: E402
from attngen.bench.timing import time_interleaved  # noqa: E402
from tools import fp8_accuracy  # noqa: E402
from tools.cudnn_graph import find_cudnn  # noqa: E402
from tools.fp8_accuracy import E4M3, LARGEST, Call, Case  # noqa: E402
from tools.reports import timing_of, timing_options, write_rows  # noqa: E402

SCHEMA = 1
DROPOUT = 0.1
SHAPES = [(1, 16384), (4, 4096)]  # batch, tokens
HEADS = {128: 16, 64: 32, 256: 8}  # by head dim
TOLERANCE = 0.2  # of the output, root mean squares: cuDNN and attngen computed the same


def cases(head_dims: list[int]) -> list[tuple[int, Case]]:
    """Batch and case of each row."""
    return [
        (batch, Case("normal", d, HEADS[d], tokens, tokens, mask))
        for d in head_dims
        for batch, tokens in SHAPES
        for mask in ("none", "causal")
    ]


def calls_of(batch: int, case: Case, cudnn: Any) -> tuple[dict[str, Timed], dict[str, str]]:
    """Who is timed, and why others are not."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, case.s_q, case.heads, case.head_dim)
    made = [torch.randn(shape, generator=generator, device="cuda") for _ in "qkv"]
    originals = dict(zip("qkv", made, strict=True))
    stored, descales = fp8_accuracy.store(originals)
    named = {f"descale_{name}": descale for name, descale in descales.items()}
    attend: Callable[..., Any] = partial(attngen.attention, mask=case.mask, backend="cuda")
    in_16_bits = {name: x.to(torch.bfloat16) for name, x in originals.items()}
    eight = partial(attend, **stored, **named, out_dtype=torch.bfloat16)
    scale_o = (LARGEST / originals["v"].abs().max())[None]
    calls: dict[str, Timed] = {
        "attngen": eight,
        "attngen to e4m3": partial(attend, **stored, **named, out_dtype=E4M3, scale_o=scale_o),
        "attngen bf16": partial(attend, **in_16_bits),
    }
    drops = {"dropout_p": DROPOUT, "rng_state": torch.tensor((0, 0), device="cuda")}
    for name in ("attngen", "attngen bf16"):
        calls[f"{name} dropout"] = partial(calls[name], **drops)
    if cudnn is None:
        return calls, {}
    try:
        peer = cudnn(Call(case, stored, descales, E4M3, scale_o))
        ours, theirs = eight().float(), peer().float() / scale_o
        error = float((ours - theirs).square().mean().sqrt() / ours.square().mean().sqrt())
        if not error <= TOLERANCE:
            raise RuntimeError(f"its output differs by {error:.2g} of attngen's")
        calls["cudnn"] = peer
    except RuntimeError as error:
        return calls, {"cudnn": describe(error)}
    return calls, {}


def measure(
    head_dims: list[int], rounds: int, settle_ms: float, budget_ms: float, cudnn: Any
) -> Iterator[dict[str, Any]]:
    """A row a case."""
    for batch, case in cases(head_dims):
        calls, missing = calls_of(batch, case, cudnn)
        ms = time_interleaved(calls, rounds, budget_ms, settle_ms=settle_ms)
        flops = 4 * batch * case.heads * case.s_q**2 * case.head_dim
        flops //= 2 if case.mask == "causal" else 1
        row: dict[str, Any] = {
            "case": f"b{batch}-s{case.s_q}-h{case.heads}-d{case.head_dim}-{case.mask}",
            "ms": {name: round(x, 4) for name, x in ms.items()},
            "tflops": {name: round(flops / x / 1e9, 1) for name, x in ms.items()},
            "to_bf16": round(ms["attngen bf16"] / ms["attngen"], 3),
        }
        if "cudnn" in ms:
            row["to_cudnn"] = round(ms["cudnn"] / ms["attngen"], 3)
            row["e4m3_to_cudnn"] = round(ms["cudnn"] / ms["attngen to e4m3"], 3)
        figures = "  ".join(f"{name} {x:.0f}" for name, x in row["tflops"].items())
        ratios = f"x cudnn {row.get('to_cudnn', '-')}  x bf16 {row['to_bf16']}"
        print(f"{row['case']:28s} {figures}  {ratios}", flush=True)
        yield {**row, "missing": missing}


def main(arguments: list[str] | None = None) -> int:
    options = timing_options(__doc__ or "", HEADS, arguments)
    versions: dict[str, str] = {"attngen": attngen.__version__}
    absent: dict[str, str] = {}
    builder = find_cudnn(fp8_accuracy.cudnn_builder, versions, absent)
    rows = measure(options.head_dims, options.rounds, options.settle_ms, options.budget_ms, builder)
    write_rows(
        options.output,
        SCHEMA,
        rows,
        versions=versions,
        absent=absent,
        **timing_of(options),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
