"""Times what a caller waits for besides the kernel itself, on one GPU, and writes it as JSON.

    FA3_SO=path/to/flash_attn_3/_C.so python tools/latency.py -o docs/results/latency.json

- host: microseconds a call of `attngen.attention` keeps the host, on a tiny problem, without
  gradients, beside the same call in TransformerEngine's words, and FlashAttention-3 where FA3_SO
  names its torch library; one process, the order shuffled every round.
- first call: milliseconds from a call to its launch, in a fresh process that has torch, its
  context and the operands, and finds the kernel in the cache on disk; compiling is forbidden, so
  that a miss is an error. Byte code is cached, as it is where a package was installed.
- build: seconds from spec to the cubins that a call needs on one core, in a process that has built
  another kernel, the caches of attngen and of NVRTC switched off.
Every figure is a median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CALLS, ROUNDS = 200, 15
# Where the first call spends its time: name → module and function of attngen.
STAGES = {
    "call: checks": ("frontends.pytorch.routing", "use_kernels"),
    "call: import of cuda.bindings.driver": ("runtime.load", "driver"),
    "call: cache": ("call.kernel_choice", "find_kernels"),
    "call: load": ("runtime.load", "load"),
    "call: launch": ("frontends.pytorch.operation", "launch"),
}


def operands() -> Any:
    """q, k, v bf16 [1, 128, 4, 64], on the device when this returns."""
    import torch

    made = [torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    torch.cuda.synchronize()
    return made


def host_times() -> dict[str, float]:
    """Microseconds a call."""
    import torch

    import attngen
    from attngen.bench.timing import host_interleaved

    q, k, v = operands()
    calls: dict[str, Callable[[], Any]] = {
        "attngen causal": lambda: attngen.attention(q, k, v, mask="causal"),
        "attngen full": lambda: attngen.attention(q, k, v),
        "attngen causal, LSE": lambda: attngen.attention(q, k, v, mask="causal", return_lse=True),
    }
    calls |= _calls_of_transformer_engine(q, k, v)
    if library := os.environ.get("FA3_SO"):
        torch.ops.load_library(library)

        def fa3(causal: bool) -> Any:
            return torch.ops.flash_attn_3.fwd(
                *(q, k, v, *[None] * 17, None, None, None, q.shape[-1] ** -0.5, causal, -1, -1),
                *(0, 0.0, True, None, 1, None, 0),
            )

        calls |= {"fa3 causal": lambda: fa3(True), "fa3 full": lambda: fa3(False)}
    taken = host_interleaved(calls, ROUNDS, CALLS)
    return {name: round(us, 2) for name, us in taken.items()}


def _calls_of_transformer_engine(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """The causal call in TransformerEngine's words: its module, and its function, with the LSE."""
    import torch

    from attngen import te

    module = te.DotProductAttention(q.shape[2], q.shape[3], qkv_format="bshd").eval()
    length = q.shape[1]
    ends = torch.tensor([0, length], dtype=torch.int32, device=q.device)
    words: dict[str, Any] = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd"}
    words["attn_mask_type"] = "causal"
    backend = te.FusedAttnBackend.F16_arbitrary_seqlen
    given = (False, length, length, ends, ends, q, k, v, q.dtype, backend)
    return {
        "te module causal": lambda: module(q, k, v),
        "te fused_attn_fwd causal": lambda: te.fused_attn_fwd(*given, **words),
    }


def first_call() -> dict[str, float]:
    """Milliseconds of this process's first call, of its stages and of what comes before it."""
    q, k, v = operands()
    found: dict[str, float] = {}
    start = time.perf_counter()
    import attngen

    found["import attngen"] = time.perf_counter() - start
    start = time.perf_counter()
    attention = attngen.attention
    found["attngen.attention"] = time.perf_counter() - start
    _time_stages(found)
    start = time.perf_counter()
    attention(q, k, v, mask="causal", backend="cuda")
    found["call"] = time.perf_counter() - start
    return {name: seconds * 1e3 for name, seconds in found.items()}


def _time_stages(found: dict[str, float]) -> None:
    """Adds up in `found` the seconds of each stage, without those of a stage inside it."""
    inside: list[float] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                found[name] = found.get(name, 0.0) + seconds - inside.pop()
                if inside:
                    inside[-1] += seconds

        return wrapper

    for name, (module, function) in STAGES.items():
        home = sys.modules[f"attngen.{module}"]
        setattr(home, function, timed(name, getattr(home, function)))


def build_times() -> dict[str, float]:
    """Seconds from spec to cubins: forwards of head dim 128, sets of backward kernels."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from attngen import AttentionSpec
    from attngen.compiler.builder import Built, build_problem
    from attngen.fragments import features
    from attngen.spec.resolve import resolve

    def build(spec: AttentionSpec) -> tuple[Built, ...]:
        (problem,) = resolve(spec, features.scan())
        return build_problem(problem, "sm_90a", kernel="sm90_fwd")

    build(AttentionSpec(head_dim=64))
    specs = {
        "full": AttentionSpec(head_dim=128),
        "causal": AttentionSpec(head_dim=128, mask="causal"),
        **{
            f"backward {d}": AttentionSpec(head_dim=d, mask="causal", directions=("bwd",))
            for d in (64, 128, 256)
        },
        "backward 192/128": AttentionSpec(
            head_dim=192, head_dim_v=128, mask="causal", directions=("bwd",)
        ),
    }
    found = {}
    for name, spec in specs.items():
        start = time.perf_counter()
        built = build(spec)
        found[name] = time.perf_counter() - start
        if any(kernel.from_cache for kernel in built):
            raise RuntimeError("a kernel came from the cache")
    return found


CHILDREN: dict[str, Callable[[], dict[str, float]]] = {"first": first_call, "build": build_times}


def medians(child: str, runs: int, **environment: str) -> dict[str, float]:
    """Medians of what fresh processes measure."""
    results = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, __file__, "--child", child],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{child}:\n{done.stderr}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: round(statistics.median(r[name] for r in results), 3) for name in results[0]}


def measure(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        kept = {
            "ATTNGEN_CACHE_DIR": f"{scratch}/cache",
            "PYTHONPYCACHEPREFIX": f"{scratch}/byte-code",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        medians("first", 1, **kept)  # fills both caches
        hit = {**kept, "ATTNGEN_DISABLE_JIT": "1"}
        builds = []
        for number in range(runs):
            fresh = {"ATTNGEN_CACHE_DIR": f"{scratch}/{number}", "CUDA_CACHE_DISABLE": "1"}
            builds.append(medians("build", 1, **{**kept, **fresh}))
        report = {
            "host_us": host_times(),
            "first_call_ms": medians("first", runs, **hit),
            "spec_to_cubin_s": {
                name: statistics.median(each[name] for each in builds) for name in builds[0]
            },
        }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes a figure")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child]()))
        return 0
    from attngen.bench.machine import describe_machine
    from attngen.io.values import to_data

    report = measure(options.runs)
    for title, figures in report.items():
        for name, figure in figures.items():
            print(f"{title:16s} {name:36s} {figure:9.3f}")
    if options.output:
        report = {**to_data(describe_machine()), "runs": options.runs, "rounds": ROUNDS, **report}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
