"""Times head dims above 256 beside PyTorch's kernels that compute them, as JSON.

    python tools/wide_speed.py fwd -o docs/results/wide-forward.json
    python tools/wide_speed.py bwd -o docs/results/wide-backward.json

Forwards to 576/512 and backwards to 512, bf16, 8 heads, beside compiled FlexAttention and the
memory-efficient kernel of PyTorch's SDPA, with the rate of cuBLAS measured between them. Each
result is held to float64 before it is timed; interleaved rounds, medians. FlexAttention runs with
blocks of its own choice, else with the first of smaller ones that fit; `--skip N` leaves the first
ones out where they are known not to. `--compile` fills its cache and leaves. The report is of the
form of `attngen bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen.bench import run  # noqa: E402
from attngen.bench.peers import (  # noqa: E402
    Call,
    Operands,
    Peer,
    Results,
    describe,
    differentiated,
    load,
)
from attngen.bench.report import Report, save, text_row  # noqa: E402
from attngen.bench.workloads import KI, Case  # noqa: E402

HEADS = 8
SHAPES = ((4, 4 * KI), (1, 16 * KI))  # batch, tokens; of the first head dims, of others one
DIMS = {"fwd": ((512, 512), (576, 512), (384, 384)), "bwd": ((512, 512), (384, 384), (320, 320))}
# Of FlexAttention: its own blocks, else larger and smaller ones, of its forward and both parts of
# its backward, of which the first that fit shared memory run.
PARTS = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
LARGER = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8} | dict.fromkeys(PARTS, 32)
SMALLER = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4} | dict.fromkeys(PARTS, 16)
BLOCKS: tuple[dict[str, int] | None, ...] = (
    None,
    LARGER | {"num_stages": 1},
    SMALLER | {"num_stages": 1},
)


def cases(direction: str) -> tuple[Case, ...]:
    """Self-attention of each pair of head dims, length and mask."""
    return tuple(
        Case(batch, length, HEADS, HEADS, d, d_v, causal)
        for number, (d, d_v) in enumerate(DIMS[direction])
        for batch, length in SHAPES[: 1 if number else None]
        for causal in (False, True)
    )


def flex(skipped: int) -> Peer:
    """Compiled FlexAttention with the first blocks that run, so many of which are not tried."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def once(case: Case, operands: Operands, options: dict[str, int] | None) -> Call:
        torch.compiler.reset()  # past a number of shapes it would silently stop compiling
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        q, k, v = (each.transpose(1, 2) for each in operands[:3])
        blocks, size = None, case.length
        if case.causal:
            device = str(q.device)
            blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device)

        def call() -> Results:
            out: Tensor = compiled(q, k, v, block_mask=blocks, kernel_options=options)
            return (out.transpose(1, 2),)

        return call

    # By direction and head dim: blocks to try.
    left: dict[tuple[str, int], tuple[Any, ...]] = defaultdict(lambda: BLOCKS[skipped:])

    def forward(case: Case, operands: Operands) -> Call:
        return _first_that_runs(
            left, ("fwd", case.head_dim), lambda options: once(case, operands, options)
        )

    def backward(case: Case, operands: Operands) -> Call:
        def of(options: dict[str, int] | None) -> Call:
            return differentiated(lambda case, given: once(case, given, options))(case, operands)

        return _first_that_runs(left, ("bwd", case.head_dim), of)

    return Peer(f"torch {torch.__version__}, compiled", {"fwd": forward, "bwd": backward})


def _first_that_runs(
    left: dict[tuple[str, int], tuple[Any, ...]], key: tuple[str, int], make: Callable[[Any], Call]
) -> Call:
    """A call with the first blocks with which it runs, and `left` without those with which it does
    not. Raises: what the last ones raised."""
    while True:
        options, *others = left[key]
        try:
            call = make(options)
            call()
        except Exception as error:  # a peer refuses in its own way
            print(f"  flex, {key}, {options or 'blocks of its own'}: {describe(error)}", flush=True)
            if not others:
                raise
            left[key] = tuple(others)
        else:
            return call


def compile_peer(peer: Peer, direction: str, case: Case) -> str:
    """Fill the cache of a peer's compiler with a case's kernels; what came of it."""
    with torch.no_grad():
        _, missing = run.checked_calls(direction, case, {"flex": peer.makers[direction]})
    return missing.get("flex", "runs, and is right")


def measure(direction: str, options: argparse.Namespace) -> None:
    """Time every case, writing the report anew with each."""
    found, absent = load(["efficient"])
    peers = {**found, "flex": flex(options.skip)}
    manner = run.Manner(options.rounds, options.budget_ms)
    names = [*run.participants(direction, peers, manner)]

    def tell(report: Report) -> None:
        print(text_row(report.rows[-1], names), flush=True)
        torch.cuda.empty_cache()  # of compiled peers
        if options.output:
            save(report, options.output)

    run.run(direction, cases(direction), peers, absent, manner, tell)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("direction", choices=[*DIMS])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-ms", type=float, default=20)
    parser.add_argument("--skip", type=int, choices=range(len(BLOCKS)), default=0)
    parser.add_argument("--compile", action="store_true", help="compile and check, time nothing")
    options = parser.parse_args(arguments)
    direction = options.direction
    specs = {
        attngen.AttentionSpec(case.head_dim, head_dim_v=case.head_dim_v, mask=mask, directions=ways)
        for case in cases(direction)
        for mask in ("none", "causal")
        for ways in [("fwd", "bwd") if direction == "bwd" else ("fwd",)]
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(attngen.build, specs))
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if options.compile:
        peer = flex(options.skip)
        for case in cases(direction):
            print(f"{case.name}: flex {compile_peer(peer, direction, case)}", flush=True)
        return 0
    measure(direction, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
