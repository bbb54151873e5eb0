"""Measures how long kernels take to compile by head dim, to 576, without a GPU, as JSON.

    python tools/wide_compile.py -o docs/results/wide-compile.json

CPU seconds of NVRTC in this process from a source to a cubin: of causal forwards, and of each large
kernel of their backwards, whose others take a tenth of these. `seconds` are medians of five,
`least` the least. Other work on the machine takes caches, and so makes both larger.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attngen import AttentionSpec  # noqa: E402  # a checkout not installed, too
from attngen.compiler.builder import render_problem  # noqa: E402
from attngen.compiler.compile import run_nvrtc  # noqa: E402
from attngen.fragments.features import scan  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.spec.attention_spec import MAX_TRAINED_HEAD_DIM  # noqa: E402
from attngen.spec.resolve import resolve  # noqa: E402
from attngen.targets.target import DEFAULT  # noqa: E402
from tools.reports import write_rows  # noqa: E402

SCHEMA = 1
DIMS = ((128, 128), (256, 256), (320, 320), (384, 384), (512, 512), (576, 512))
DIRECTIONS = ("fwd", "bwd")
ROUNDS = 5


def measure(dims: tuple[int, int], direction: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the kernels of causal calls of these head dims, none of gradients above 512. Others
    than the tensor cores' take a tenth of these, and are left out."""
    d, d_v = dims
    if direction == "bwd" and d > MAX_TRAINED_HEAD_DIM:
        return
    spec = AttentionSpec(d, head_dim_v=d_v, mask="causal", directions=(direction,))
    problem = resolve(spec, scan())[0]
    for plan in plans(problem, DEFAULT.name):
        if "wgmma" not in (text := render_problem(problem, plan).text):
            continue
        seconds = []
        for _ in range(rounds):
            start = time.process_time()
            run_nvrtc(text, "kernel.cu", DEFAULT.name)
            seconds.append(time.process_time() - start)
        row = {
            "head_dims": f"{d}/{d_v}",
            "kernel": plan.family,
            "seconds": round(statistics.median(seconds), 2),
            "least": round(min(seconds), 2),
        }
        print(*row.values(), flush=True)
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    asked = product(DIMS, DIRECTIONS)
    rows = (row for dims, each in asked for row in measure(dims, each, options.rounds))
    write_rows(options.output, SCHEMA, rows, rounds=options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
