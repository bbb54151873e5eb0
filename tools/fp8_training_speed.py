"""Times whole steps of attention, forward and backward, in FP8 and in bfloat16, as JSON.

    python tools/fp8_training_speed.py -o docs/results/fp8-training-speed.json

A step takes 16-bit q, k, v and the output's gradient and gives 16-bit gradients, under recipes of
attngen.fp8, casts included; these are timed alone, too, and so is a step of operands that are
stored already. Each is called, and replayed out of a CUDA graph, in which the host takes no part.
Interleaved rounds, medians. docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen import fp8  # noqa: E402
from attngen.bench.timing import Call, time_interleaved  # noqa: E402
from attngen.call.recipe import CastRule  # noqa: E402
from attngen.frontends.pytorch.narrow import by_kernels  # noqa: E402
from tools.fp8_backward_speed import HEADS, SHAPES, Case  # noqa: E402
from tools.graphs import captured  # noqa: E402
from tools.reports import timing_of, timing_options, write_rows  # noqa: E402

SCHEMA = 1
HISTORY = 16


def recipes() -> dict[str, fp8.DelayedScaling | fp8.Float8CurrentScaling]:
    """Recipes by the names of their steps."""
    delayed = partial(fp8.DelayedScaling, amax_history_len=HISTORY)
    return {
        "current": fp8.Float8CurrentScaling(),
        "current, 8 bits": fp8.Float8CurrentScaling(backward="fp8"),
        "delayed": delayed(),
        "delayed, 8 bits": delayed(backward="fp8"),
    }


def step(
    attend: Callable[..., Any], context: Callable[[], Any], tensors: list[Tensor], mask: str
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v. tensors: with the gradient of the output behind them."""
    *qkv, d_o = tensors
    with context():
        out = attend(*qkv, mask=mask)
    return torch.autograd.grad(out, qkv, d_o)


def stored(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors in FP8, by scales of their own."""
    with torch.no_grad():
        return [fp8.CurrentQuantizer(torch.float8_e4m3fn, x.device)(x) for x in tensors]


def casts(tensors: list[Tensor]) -> None:
    """Cast the tensors of a step as a recipe does: q, k and v together, then the gradient."""
    *qkv, d_o = tensors
    for given, dtype in ((qkv, "float8_e4m3fn"), ([d_o], "float8_e5m2")):
        made = by_kernels(given, [None] * len(given), CastRule(dtype))
        assert made is not None  # kernels serve these


def calls_of(tensors: list[Tensor], mask: str, backend: str) -> dict[str, Call]:
    """Calls that are timed, by their names in the report. tensors: q, k, v and the gradient of the
    output."""
    attend = partial(attngen.attention, backend=backend)
    calls: dict[str, Call] = {"bf16": partial(step, attend, nullcontext, tensors, mask)}
    for name, recipe in recipes().items():
        layer = fp8.Attention(HISTORY, tensors[0].device)
        context = partial(fp8.autocast, recipe=recipe)
        of_layer = partial(layer, backend=backend)
        calls[name] = partial(step, of_layer, context, tensors, mask)
    leaves = [x.requires_grad_() for x in stored(tensors[:-1])]
    context = partial(fp8.autocast, recipe=recipes()["current, 8 bits"])
    calls["stored, 8 bits"] = partial(step, attend, context, [*leaves, tensors[-1]], mask)
    calls["casts"] = partial(casts, [x.detach() for x in tensors])
    return calls


def tensors_of(case: Case) -> list[Tensor]:
    """q, k and v that want gradients, and the output's gradient, standard normal in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (case.batch, case.tokens, HEADS[case.head_dim], case.head_dim)
    made = [
        torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(4)
    ]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


GRAPH = "graph: "  # before the name of a call that is replayed


def row_of(case: Case, ms: dict[str, float]) -> dict[str, Any]:
    """A row of the report."""
    flops = case.flops * 7 / 5  # two products of a forward beside a backward's five
    timed = {name: x for name, x in ms.items() if not name.endswith("casts")}
    of_bf16 = {name: ms[f"{GRAPH}bf16" if name.startswith(GRAPH) else "bf16"] for name in timed}
    return {
        "case": case.name,
        "ms": {name: round(x, 4) for name, x in ms.items()},
        "tflops": {name: round(flops / x / 1e9, 1) for name, x in timed.items()},
        "to_bf16": {
            name: round(of_bf16[name] / x, 3)
            for name, x in timed.items()
            if not name.endswith("bf16")
        },
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a case."""
    for d in options.head_dims:
        for batch, tokens in SHAPES:
            for mask in ("none", "causal"):
                case = Case(batch, tokens, d, mask)
                calls = calls_of(tensors_of(case), mask, "cuda")
                calls |= {f"{GRAPH}{name}": captured(call) for name, call in calls.items()}
                timing = options.rounds, options.budget_ms
                row = row_of(case, time_interleaved(calls, *timing, settle_ms=options.settle_ms))
                figures = "  ".join(f"{name} {x:.2f} ms" for name, x in row["ms"].items())
                print(f"{case.name:26s} {figures}  x bf16 {row['to_bf16']}", flush=True)
                yield row


def main(arguments: list[str] | None = None) -> int:
    options = timing_options(__doc__ or "", HEADS, arguments)
    write_rows(options.output, SCHEMA, measure(options), **timing_of(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
