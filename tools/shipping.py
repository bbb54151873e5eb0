"""Measures what shipping kernels costs, and writes it as JSON: a set built ahead of time, the sizes
of its bundles, and on a GPU how long a server waits until its first launch out of one.

    python tools/shipping.py -o docs/results/shipping.json

- build: wall seconds and peak memory of one `attngen build` of 512 kernels on all cores, the
  caches of attngen and NVRTC empty.
- bundles: of all these kernels, and of the 50 causal ones with head dims up to 200.
- start: milliseconds in a fresh process that has torch, its context, the operands and
  `attngen.attention`, and no compiled kernel but the bundle of 50: until it is opened and verified,
  until the first call has launched, until its result is there. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Forwards up to 128 have two kernels.
MANY_DIMS = (*range(8, 129, 8), *range(144, 257, 16))
FIFTY_DIMS = (*range(16, 129, 16), *range(136, 201, 8))
MANY = """
[defaults]
head_dim = {head_dims}
dtype = ["bf16", "fp16"]
[[kernel]]
mask = ["none", "causal"]
window = [false, true]
[[kernel]]
mask = ["none", "causal"]
window = [false, true]
out_dtype = "fp32"
"""
FIFTY = """
[[kernel]]
head_dim = {head_dims}
dtype = ["bf16", "fp16"]
mask = "causal"
"""


def attngen(*arguments: object, **environment: str) -> list[dict[str, Any]]:
    """Run a command with --json, and parse what it prints, one object a line."""
    done = subprocess.run(
        [sys.executable, "-m", "attngen", *map(str, arguments), "--json"],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure_build(specs: Path, cache: Path) -> dict[str, Any]:
    start = time.perf_counter()
    kernels = attngen("build", specs, ATTNGEN_CACHE_DIR=str(cache), CUDA_CACHE_DISABLE="1")
    seconds = time.perf_counter() - start
    return {
        "kernels": len(kernels),
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(seconds, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "compile_seconds": describe(kernel["seconds"] for kernel in kernels),
    }


def measure_bundle(specs: Path, cache: Path, output: Path) -> dict[str, Any]:
    """Measure a bundle of kernels that the cache has."""
    start = time.perf_counter()
    found = attngen("bundle", "build", specs, "-o", output, ATTNGEN_CACHE_DIR=str(cache))[-1]
    seconds = time.perf_counter() - start
    listed = attngen("bundle", "ls", output)
    return {
        "kernels": found["kernels"],
        "bytes": found["bytes"],
        "bytes_a_kernel": round(found["bytes"] / found["kernels"]),
        "cubin_bytes": describe(each["resources"]["cubin_bytes"] for each in listed),
        "stored_bytes": describe(each["stored_bytes"] for each in listed),
        "seconds": round(seconds, 2),
    }


def describe(values: Iterable[float]) -> dict[str, float]:
    """Smallest, median and largest."""
    ordered = sorted(values)
    middle = round(statistics.median(ordered), 3)
    return {"least": ordered[0], "median": middle, "most": ordered[-1]}


def start(path: str) -> dict[str, float]:
    """Milliseconds of this process."""
    import torch

    shape = (1, 128, 4, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    from attngen import attention, load_bundle

    times = [time.perf_counter()]
    load_bundle(path)
    times.append(time.perf_counter())
    attention(q, k, v, mask="causal", backend="cuda")
    times.append(time.perf_counter())
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    names = ("opened and verified", "launched", "result")
    return {name: (t - times[0]) * 1e3 for name, t in zip(names, times[1:], strict=True)}


def measure_start(bundle: Path, runs: int, scratch: Path) -> dict[str, float]:
    environment = {
        **os.environ,
        "ATTNGEN_DISABLE_JIT": "1",
        "ATTNGEN_CACHE_DIR": str(scratch / "no cache"),
        "PYTHONPYCACHEPREFIX": str(scratch / "byte code"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    samples = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [sys.executable, __file__, "--start", str(bundle)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        samples.append(json.loads(done.stdout.splitlines()[-1]))
    warm = samples[1:]  # the first wrote the byte code
    return {name: round(statistics.median(each[name] for each in warm), 2) for name in warm[0]}


def measure(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        many, fifty, cache = scratch / "many.toml", scratch / "fifty.toml", scratch / "cache"
        many.write_text(MANY.format(head_dims=[*MANY_DIMS]))
        fifty.write_text(FIFTY.format(head_dims=[*FIFTY_DIMS]))
        report: dict[str, Any] = {"build": measure_build(many, cache)}
        report["bundles"] = [
            measure_bundle(specs, cache, scratch / f"{specs.stem}.attn") for specs in (fifty, many)
        ]
        if runs:
            report["start_ms"] = measure_start(scratch / "fifty.attn", runs, scratch)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes; 0: without a GPU")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start)))
        return 0
    from attngen.bench.machine import describe_machine
    from attngen.io.values import to_data

    report = {**to_data(describe_machine()), "runs": options.runs, **measure(options.runs)}
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
