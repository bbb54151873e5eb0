"""Times kernels by products of warps, built for sm_90 and run on Hopper, as JSON.

    python tools/mma_sync_speed.py -o docs/results/mma-sync.json

Forwards and backwards beside FlashAttention-2, which are the operators that PyTorch's SDPA calls,
and one query a sequence beside the decode for Hopper. Each result is held to float64 before it is
timed; interleaved rounds, medians.
docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from cuda.bindings import driver  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen import AttentionSpec  # noqa: E402
from attngen.bench import checking, decode, run, workloads  # noqa: E402
from attngen.bench.peers import Call, Operands, describe, ours  # noqa: E402
from attngen.bench.timing import cuda_milliseconds, time_interleaved  # noqa: E402
from attngen.compiler.compile import run_nvrtc  # noqa: E402
from attngen.errors import MeasureError  # noqa: E402
from attngen.runtime.load import checked  # noqa: E402
from tests.support.caches import kernels_of  # noqa: E402
from tools.reports import write_report, write_rows  # noqa: E402

SCHEMA = 1
ARCH, HOPPER = "sm_90", "sm_90a"
OURS, FLASH, WGMMA = "attngen mma.sync", "FlashAttention-2", "attngen wgmma"
PAGED = "paged_kv_bshd_bshd_bshd"
SHAPES = ((4, 4096), (1, 16384))  # batch, tokens
HEADS = 16
HEAD_DIMS = (64, 128, 96, 192, 256)


@dataclass(frozen=True)
class Decode:
    """One query of each sequence, bf16, against `length` keys, dense or in pages of `pages`."""

    batch: int
    heads_q: int
    heads_kv: int
    length: int
    head_dim: int
    pages: int  # 0: dense

    @property
    def name(self) -> str:
        where = f"p{self.pages}" if self.pages else "dense"
        heads = f"h{self.heads_q}/{self.heads_kv}"
        return f"b{self.batch}-{heads}-kv{self.length // 1024}k-d{self.head_dim}-{where}"

    @property
    def page(self) -> int:
        """Positions of a page of the operands, which are made in both forms."""
        return self.pages or 64

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        return 2 * 2 * self.batch * self.heads_kv * self.length * self.head_dim


DECODES = tuple(
    Decode(*shape[:4], head_dim, shape[4])
    for head_dim in (64, 128)
    for shape in (
        *((64, 32, 8, 4096, 64), (64, 32, 8, 4096, 16), (64, 32, 8, 4096, 0)),
        *((8, 32, 8, 32768, 64), (1, 64, 8, 131072, 64), (256, 32, 8, 1024, 64)),
        (32, 16, 16, 4096, 0),
    )
)


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
    for d in {each.head_dim for each in DECODES} if "decode" in directions else ():
        for layout in ("bshd", PAGED):
            for arch in (ARCH, HOPPER):
                yield AttentionSpec(d, layout=layout, decode=True), arch


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


def decode_call(case: Decode, x: decode.Operands) -> Callable[[], Any]:
    """A call of `attention`, of whatever kernels calls have now."""
    given, more = (x.q, *x.dense), cast(dict[str, Any], {})
    if case.pages:
        given = (x.q, x.k_pages, x.v_pages)
        more = {"layout": PAGED, "page_table": x.table, "seqused_kv": x.lengths}
    return lambda: attngen.attention(*given, **more, backend="cuda")


def decode_row(case: Decode, rounds: int, budget_ms: float) -> dict[str, Any]:
    """One decode by both families' kernels. Raises: MeasureError on a wrong result."""
    with torch.no_grad():
        made: Any = case  # has what bench's own cases have
        operands = decode.random_operands(made, torch.device("cuda"))
        expected = decode.expect(made, operands)
        graphs = {}
        for name, arch in ((OURS, ARCH), (WGMMA, HOPPER)):
            with kernels_of(arch):
                call = decode_call(case, operands)
                checking.check((call(),), expected)
                graphs[name] = decode.graphed(call)
        ms = time_interleaved(graphs, rounds, budget_ms)
    us = {name: each * 1e3 / decode.GRAPH_CALLS for name, each in ms.items()}
    return {
        "direction": "decode",
        "case": case.name,
        "us": {name: round(each, 2) for name, each in us.items()},
        "gbps": {name: round(case.bytes / each / 1e3) for name, each in us.items()},
        "ratio": round(us[WGMMA] / us[OURS], 3),
    }


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a case of the directions that were asked for."""
    for direction in options.directions:
        for each in DECODES if direction == "decode" else cases(options.head_dims):
            if isinstance(each, Decode):
                row = decode_row(each, options.rounds, options.budget_ms)
            else:
                row = prompt_row(direction, each, options.rounds, options.budget_ms)
            rates = row.get("tflops") or row["gbps"]
            print(f"{direction} {row['case']:<26} {row['ratio']}  {rates}", flush=True)
            torch.cuda.empty_cache()
            yield row


def means_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means of ratios by direction, and of head dims 64 and 128 alone."""
    found: dict[str, list[float]] = {}
    for row in rows:
        names = [row["direction"]]
        if row["direction"] != "decode" and any(f"-d{d}-" in row["case"] for d in (64, 128)):
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
    ways = ("fwd", "bwd", "decode")
    parser.add_argument("--directions", nargs="+", default=ways, choices=ways)
    parser.add_argument("--build", action="store_true", help="compile the kernels and leave")
    options = parser.parse_args(arguments)
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
