"""Times kernels by products of warps, built for sm_90 and run on Hopper, as JSON.

    python tools/mma_sync_speed.py -o docs/results/mma-sync.json

Forwards and backwards beside FlashAttention-2, which are the operators that PyTorch's SDPA calls,
one query a sequence beside the decode for Hopper, and prompts in 8 bits beside those in 16. Each
result is held to float64 before it is timed, those in 8 bits to 16; interleaved rounds, medians.
With --compile it measures instead how long forwards take to compile, without a GPU.
docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from cuda.bindings import driver  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen import AttentionSpec  # noqa: E402
from attngen.bench import checking, run, workloads  # noqa: E402
from attngen.bench.peers import Call, Operands, describe, ours  # noqa: E402
from attngen.bench.timing import cuda_milliseconds, time_interleaved  # noqa: E402
from attngen.compiler.builder import render_problem  # noqa: E402
from attngen.compiler.compile import compile_source, run_nvrtc  # noqa: E402
from attngen.errors import MeasureError  # noqa: E402
from attngen.fragments.features import scan  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.runtime.load import checked  # noqa: E402
from attngen.spec.resolve import resolve  # noqa: E402
from tests.support.caches import kernels_of  # noqa: E402
from tools import mma_sync_decode as decodes  # noqa: E402
from tools import mma_sync_narrow as narrow  # noqa: E402
from tools.mma_sync_decode import ARCH, OURS  # noqa: E402
from tools.reports import write_report, write_rows  # noqa: E402

SCHEMA = 1
FLASH = "FlashAttention-2"
SHAPES = ((4, 4096), (1, 16384))  # batch, tokens
HEADS = 16
HEAD_DIMS = (64, 128, 96, 192, 256)
COMPILED_FOR = ("sm_80", "sm_86", "sm_89", "sm_120")


PRODUCTS = """
extern "C" __global__ void products(unsigned long long* cycles, float* sums, int turns) {
  const unsigned a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {4, 5};
  float c[8][4] = {};
  const unsigned long long start = clock64();
  for (int i = 0; i < turns; ++i) {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[k][0]), "+f"(c[k][1]), "+f"(c[k][2]), "+f"(c[k][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock64() - start;
  float sum = 0;
  for (int k = 0; k < 8; ++k) sum += c[k][0] + c[k][1] + c[k][2] + c[k][3];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""
PRODUCT_WARPS, PRODUCT_TURNS = 8, 20000  # of a CTA an SM: two a scheduler


def products() -> dict[str, float]:
    """Measure products of 16 x 8 x 16 alone: TFLOP/s, and cycles of a scheduler for one,
    on the SM that takes longest."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cycles = torch.zeros(sms, dtype=torch.int64, device="cuda")
    sums = torch.zeros(sms * PRODUCT_WARPS * 32, device="cuda")
    module = checked("module", driver.cuModuleLoadData(run_nvrtc(PRODUCTS, "p.cu", ARCH).cubin))
    kernel = checked("kernel", driver.cuModuleGetFunction(module, b"products"))
    values = (cycles.data_ptr(), sums.data_ptr(), PRODUCT_TURNS)
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

    def call() -> None:
        stream, threads = torch.cuda.current_stream().cuda_stream, PRODUCT_WARPS * 32
        given = (values, kinds)
        checked("launch", driver.cuLaunchKernel(
            kernel, sms, 1, 1, threads, 1, 1, 0, stream, given, 0
        ))  # fmt: skip

    ms = cuda_milliseconds(call, 5)
    each = 8 * PRODUCT_TURNS * PRODUCT_WARPS
    return {
        "tflops": round(4096 * each * sms / ms / 1e9, 1),
        "cycles": round(float(cycles.max()) / (each / 4), 3),
    }


def compile_rows() -> Iterator[dict[str, Any]]:
    """CPU seconds from a spec to a cubin, of plain forwards for each chip, the least of five."""
    for arch, d, mask in product(COMPILED_FOR, HEAD_DIMS, ("none", "causal")):
        (problem,) = resolve(AttentionSpec(d, mask=mask, directions=("fwd",)), scan())
        (plan,) = plans(problem, arch)
        seconds = []
        for _ in range(5):
            start = time.process_time()
            compile_source(render_problem(problem, plan), problem, arch)
            seconds.append(time.process_time() - start)
        print(arch, problem.label, round(min(seconds), 2), flush=True)
        yield {"arch": arch, "problem": problem.label, "seconds": round(min(seconds), 2)}


def cases(head_dims: Sequence[int]) -> list[workloads.Case]:
    """Self-attention of each head dim, length and mask."""
    return [
        workloads.Case(batch, length, HEADS, HEADS, d, d, causal)
        for d in head_dims
        for batch, length in SHAPES
        for causal in (False, True)
    ]


def specs(head_dims: Sequence[int], directions: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """The kernels that are timed, and their targets."""
    ways = ("fwd", "bwd") if "bwd" in directions else ("fwd",)  # a backward follows a forward
    for d in head_dims if {*ways} & {*directions} else ():
        for mask in ("none", "causal"):
            yield AttentionSpec(d, mask=mask, directions=ways), ARCH
    if {"decode", "latent"} & {*directions}:
        yield from decodes.specs()
    if "narrow" in directions:
        yield from narrow.specs()


def flash(direction: str, case: workloads.Case, operands: Operands) -> Call:
    """FlashAttention-2 by PyTorch's operators, on the same operands."""
    q, k, v, d_o = (each.transpose(1, 2) for each in operands)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    if direction == "fwd":
        return lambda: (attend(q, k, v, 0.0, case.causal)[0].transpose(1, 2),)
    out, lse, ends_q, ends_k, most_q, most_k, seed, offset, _ = attend(q, k, v, 0.0, case.causal)
    of = torch.ops.aten._scaled_dot_product_flash_attention_backward
    rest = (ends_q, ends_k, most_q, most_k, 0.0, case.causal, seed, offset)
    return lambda: tuple(x.transpose(1, 2) for x in of(d_o, q, k, v, out, lse, *rest))


def prompt_row(
    direction: str, case: workloads.Case, rounds: int, budget_ms: float
) -> dict[str, Any]:
    """One forward or backward beside FlashAttention-2's. Raises: MeasureError on a wrong result."""
    with torch.no_grad():
        operands = run.random_operands(case)
        expected = checking.EXPECT[direction](case, operands)
        with kernels_of(ARCH):
            own = ours().makers[direction](case, operands)
            checking.check(own(), expected)
            calls: dict[str, Callable[[], Any]] = {OURS: own}
            missing = {}
            try:
                calls[FLASH] = flash(direction, case, operands)
                checking.check(calls[FLASH](), expected)
            except (MeasureError, RuntimeError) as error:
                calls.pop(FLASH, None)
                missing[FLASH] = describe(error)
            ms = time_interleaved(calls, rounds, budget_ms)
    flops = workloads.FLOPS[direction](case)
    return {
        "direction": direction,
        "case": case.name,
        "ms": {name: round(each, 4) for name, each in ms.items()},
        "tflops": {name: round(flops / each / 1e9, 1) for name, each in ms.items()},
        "ratio": round(ms[FLASH] / ms[OURS], 3) if FLASH in ms else None,
        "missing": missing,
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a case of the directions that were asked for."""
    others: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[Any]]] = {
        "decode": (decodes.decode_row, decodes.DECODES),
        "latent": (decodes.decode_row, decodes.LATENT),
        "narrow": (narrow.narrow_row, narrow.CASES),
    }
    for direction in options.directions:
        prompts = (partial(prompt_row, direction), cases(options.head_dims))
        measured, found = others.get(direction, prompts)
        for each in found:
            row = measured(each, options.rounds, options.budget_ms)
            rates = row.get("tflops") or row["gbps"]
            print(f"{direction} {row['case']:<26} {row['ratio']}  {rates}", flush=True)
            torch.cuda.empty_cache()
            yield row


def means_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means of ratios by direction, and of head dims 64 and 128 alone."""
    found: dict[str, list[float]] = {}
    for row in rows:
        names = [row["direction"]]
        if row["direction"] in checking.EXPECT and any(f"-d{d}-" in row["case"] for d in (64, 128)):
            names.append(f"{row['direction']} d64, d128")
        for name in names if row["ratio"] else ():
            found.setdefault(name, []).append(row["ratio"])
    return {name: round(statistics.geometric_mean(each), 3) for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=30)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    ways = ("fwd", "bwd", "decode", "latent", "narrow")
    parser.add_argument("--directions", nargs="+", default=ways, choices=ways)
    parser.add_argument("--build", action="store_true", help="compile the kernels and leave")
    parser.add_argument("--compile", action="store_true", help="time the compiler and leave")
    options = parser.parse_args(arguments)
    if options.compile:
        write_rows(options.output, SCHEMA, compile_rows())
        return 0
    with ThreadPoolExecutor() as pool:
        made = specs(options.head_dims, options.directions)
        list(pool.map(lambda pair: attngen.build(*pair), made))
    if options.build:
        return 0
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows: list[dict[str, Any]] = []

    def noted() -> Iterator[dict[str, Any]]:
        for row in measure(options):
            rows.append(row)
            yield row

    fields: dict[str, Any] = {
        "rounds": options.rounds,
        "budget_ms": options.budget_ms,
        "products": products(),
    }
    print(fields["products"])
    write_rows(options.output, SCHEMA, noted(), **fields)
    means = means_of(rows)
    print(means)
    if options.output:
        write_report(options.output, SCHEMA, **fields, rows=rows, means=means)
    return 0


if __name__ == "__main__":
    sys.exit(main())
