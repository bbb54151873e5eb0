"""Times variants of attention beside the plain causal kernels, as JSON.

    python tools/variant_speed.py -o docs/results/variants.json

Forward and backward at batch 4, 4096 tokens, 16 heads, head dim 128, causal; calls in CUDA graphs,
since autograd keeps the host longer than a windowed backward keeps the GPU; interleaved rounds,
medians, each at the clocks that its own power allows.
docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen.bench.timing import Call, time_interleaved  # noqa: E402
from attngen.compiler.builder import build_problem  # noqa: E402
from attngen.fragments import features  # noqa: E402
from attngen.kernels.base import TiledPlan  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.spec import resolve  # noqa: E402
from tools.reports import timing_of, write_rows  # noqa: E402

SCHEMA = 1
BATCH, LENGTH, HEADS, HEAD_DIM = 4, 4096, 16, 128
WINDOW = 512
CALLS = 4  # in a graph
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_slopes": True},
    "off_by_one": {"softmax": "off_by_one"},
    "sink": {"softmax": "learnable"},
    "window": {"window": (WINDOW, 0)},
    "softcap": {"softcap": 30.0},
    "max_logit": {"return_max_logit": True},
    "bias": {"bias": "1hss"},  # its broadcast; the backward makes its gradient, too
    "pre_scale bias": {"bias": "1hss", "bias_type": "pre_scale"},
    "bias of keys": {"bias": "111s"},
    "dropout": {"dropout_p": 0.1},
    "mask": {"attn_mask": 0.5},  # the share of a random [s, s] that takes part
    "softcap+alibi+sink": {"softcap": 30.0, "alibi_slopes": True, "softmax": "learnable"},
}


def visited_share(arguments: dict[str, Any], rows: int, keys: int) -> float:
    """Blocks of keys that the variant's tiles visit, over those of the plain kernel's; tiles of so
    many rows and blocks of so many keys."""
    left = arguments.get("window", (LENGTH, 0))[0]
    plain = visited = 0
    for first in range(0, LENGTH, rows):
        end = -(-min(first + rows, LENGTH) // keys)
        plain += end
        visited += end - max(0, first - left) // keys
    return visited / plain


def problems(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """The problems of a variant's forward and backward; a window's backward is the narrow one."""
    given = {name: x for name, x in arguments.items() if name != "sink"}
    q = torch.empty(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    spec = attngen.AttentionSpec.from_call(q, q, q, mask="causal", **given)
    both = dataclasses.replace(spec, directions=("fwd", "bwd"))
    forward, *backwards = resolve.resolve(both, features.scan())
    return forward, backwards[-1]


@dataclass(frozen=True)
class Operands:
    """A variant's operands in bf16, [b, s, h, d], with the output's gradient.

    given: what `attention` takes beside q, k and v; `differentiated`: all that get gradients.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_o: torch.Tensor
    given: dict[str, Any]

    @property
    def differentiated(self) -> list[torch.Tensor]:
        more = [self.given[name] for name in ("sink", "bias") if name in self.given]
        return [self.q, self.k, self.v, *more]


def operands_of(arguments: dict[str, Any]) -> Operands:
    """Random ones, the same for equal variants."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    q, k, v, d_o = (randn(BATCH, LENGTH, HEADS, HEAD_DIM) for _ in range(4))
    for each in (q, k, v):
        each.requires_grad_()
    given = dict(arguments)
    if given.get("softmax") == "learnable":
        given["sink"] = torch.zeros(HEADS, device="cuda", requires_grad=True)
    if "bias" in given:
        full = zip(given["bias"], (BATCH, HEADS, LENGTH, LENGTH), strict=True)
        sizes = [1 if letter == "1" else n for letter, n in full]
        given["bias"] = randn(*sizes).requires_grad_()
    if "attn_mask" in given:
        drawn = torch.rand(LENGTH, LENGTH, generator=generator, device="cuda")
        given["attn_mask"] = drawn < given["attn_mask"]
    return Operands(q, k, v, d_o, given)


def calls_of(x: Operands) -> tuple[Call, Call]:
    """The forward and the backward of a variant."""

    def attend() -> torch.Tensor:
        result = attngen.attention(x.q, x.k, x.v, mask="causal", backend="cuda", **x.given)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def forward() -> object:
        with torch.no_grad():
            return attend()

    out = attend()

    def backward() -> object:
        return torch.autograd.grad(out, x.differentiated, x.d_o, retain_graph=True)

    return forward, backward


def captured(call: Call, stream: torch.cuda.Stream) -> Call:
    """A graph of CALLS such calls. stream: where what a backward differentiates was made."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    return graph.replay


def measure(rounds: int, settle_ms: float, budget_ms: float) -> Iterator[dict[str, Any]]:
    """One row a variant and direction."""
    made = {name: problems(arguments) for name, arguments in VARIANTS.items()}
    wanted = {problem for pair in made.values() for problem in pair}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda problem: build_problem(problem, "sm_90a"), wanted))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls = {name: calls_of(operands_of(each)) for name, each in VARIANTS.items()}
        for pair in calls.values():
            for call in pair:
                call()  # kernels are loaded
    stream.synchronize()
    for index, direction in enumerate(("fwd", "bwd")):
        graphs = {name: captured(pair[index], stream) for name, pair in calls.items()}
        taken = time_interleaved(graphs, rounds, budget_ms, settle_ms=settle_ms)
        ms = {name: each / CALLS for name, each in taken.items()}
        flops = (4, 10)[index] * BATCH * HEADS * LENGTH**2 * HEAD_DIM / 2
        for name, arguments in VARIANTS.items():
            made_plans = plans(made[name][index], "sm_90a")
            tile = next(each.tile for each in made_plans if isinstance(each, TiledPlan))
            share = visited_share(arguments, tile.m, tile.n)
            row = {
                "direction": direction,
                "variant": name,
                "ms": round(ms[name], 4),
                "tflops": round(flops / ms[name] / 1e9, 1),
                "visited": round(share, 4),
                "ratio": round(ms["plain"] * share / ms[name], 3),
                "tile": dataclasses.asdict(tile),
            }
            print(f"{direction} {name:<20} {row['ms']:8.4f} ms {row['tflops']:7.1f} TFLOP/s  "
                  f"ratio {row['ratio']:.3f}", flush=True)  # fmt: skip
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-ms", type=float, default=100)
    parser.add_argument("--budget-ms", type=float, default=60)
    options = parser.parse_args()
    write_rows(
        options.output,
        SCHEMA,
        measure(options.rounds, options.settle_ms, options.budget_ms),
        case=f"b{BATCH} s{LENGTH} h{HEADS} d{HEAD_DIM} causal bf16",
        **timing_of(options),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
