"""Times the forward beside public peers on one GPU and writes the figures as JSON.

    FA3_SO=path/to/flash_attn_3/_C.so python tools/bench_forward.py -o docs/results/forward.json

Peers: PyTorch's cuDNN attention, and FlashAttention-3 where FA3_SO names its torch library. All
run on the same random normal operands, in an order shuffled every round; a figure is the median
of the rounds. FLOPs: 2·b·h·s²·(d + d_v), half of that under a causal mask.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen  # noqa: E402
from tools.gpu_results import environment  # noqa: E402

SHAPES = (  # batch, length, query heads, key/value heads, head dims of Q and V
    *((32, 512, 16, 16, 128, 128), (16, 1024, 16, 16, 128, 128), (4, 4096, 16, 16, 128, 128)),
    *((1, 16384, 16, 16, 128, 128), (4, 4096, 32, 32, 64, 64), (1, 16384, 32, 32, 64, 64)),
    *((4, 4096, 8, 8, 256, 256), (1, 16384, 8, 8, 256, 256), (2, 8192, 64, 8, 128, 128)),
    (2, 8192, 16, 16, 192, 128),
)
Call = Callable[[], Any]


def peers(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Call]:
    """What can be timed here, attngen first; q, k, v bf16 [b, s, h, d]."""
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                qt, kt, vt, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            )

    mask = "causal" if causal else "none"
    calls: dict[str, Call] = {
        "attngen": lambda: attngen.attention(q, k, v, mask=mask, backend="cuda"),
        "cudnn": cudnn,
    }
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        scale = q.shape[-1] ** -0.5
        calls["fa3"] = lambda: torch.ops.flash_attn_3.fwd(
            *(q, k, v, *[None] * 17, None, None, None, scale, causal, -1, -1, 0, 0.0, True),
            *(None, 1, None, 0),
        )
    return calls


def time_interleaved(calls: dict[str, Call], rounds: int, budget_ms: float) -> dict[str, float]:
    """Median milliseconds a call."""
    repeats: dict[str, int] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        repeats[name] = max(2, min(200, int(budget_ms / max(1e-3, _milliseconds(call, 3)))))
    names = list(calls)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            samples[name].append(_milliseconds(calls[name], repeats[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def _milliseconds(call: Call, repeats: int) -> float:
    start, end = torch.cuda.Event(True), torch.cuda.Event(True)
    call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-ms", type=float, default=25.0)
    options = parser.parse_args()
    if library := os.environ.get("FA3_SO"):
        torch.ops.load_library(library)
    rows = []
    for batch, length, heads, kv_heads, d, d_v in SHAPES:
        for causal in (False, True):
            make = [(heads, d), (kv_heads, d), (kv_heads, d_v)]
            q, k, v = (
                torch.randn(batch, length, h, x, device="cuda", dtype=torch.bfloat16)
                for h, x in make
            )
            times = time_interleaved(peers(q, k, v, causal), options.rounds, options.budget_ms)
            flops = 2 * batch * heads * length**2 * (d + d_v) / (2 if causal else 1)
            tflops = {name: round(flops / ms / 1e9, 1) for name, ms in times.items()}
            case = f"b{batch} s{length} h{heads}/{kv_heads} d{d}/{d_v}"
            case += " causal" if causal else " full"
            rows.append({"case": case, "tflops": tflops})
            print(case, tflops, flush=True)
    report = {**environment(), "dtype": "bf16", "rounds": options.rounds, "rows": rows}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
