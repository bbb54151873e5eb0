"""Times layouts and variable lengths beside plain dense calls, on one GPU, and writes it as JSON.

    FA3_SO=path/to/flash_attn_3/_C.so python tools/varlen.py -o docs/results/varlen.json

bf16, forward and backward, one process, the calls of a group interleaved in a shuffled order every
round; medians. `mix`: 64 packed sequences of log-normal length, mean 1 k, beside FlashAttention-3
where FA3_SO names its torch library. Other groups, beside a plain dense call (`bshd`): as many
packed tokens of equal lengths (`thd`), other layouts, and half of the tensor in use (`padding`)
beside a dense tensor of half the length (`half`). TFLOP/s count the work of lengths in use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402
import attngen.frontends.pytorch.forward  # noqa: E402  # defines the operations
from attngen.bench.machine import describe_machine  # noqa: E402
from attngen.bench.timing import time_interleaved  # noqa: E402
from attngen.call.numbers import Arguments  # noqa: E402
from attngen.call.table import LENGTHS, OPTIONAL  # noqa: E402
from attngen.frontends.pytorch.lengths import settle  # noqa: E402
from attngen.io.values import to_data  # noqa: E402
from attngen.spec import layouts  # noqa: E402

HEADS = 16
Calls = dict[str, Callable[[], Any]]


def mixed_lengths(count: int = 64, mean: int = 1024, seed: int = 0) -> list[int]:
    """Log-normal lengths, the same on every machine."""
    numbers = random.Random(seed)
    drawn = [numbers.lognormvariate(0, 1.0) for _ in range(count)]
    scale = mean * count / sum(drawn)
    return [max(1, int(x * scale)) for x in drawn]


def int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def ours(operands: Sequence[Tensor | None], **arguments: Any) -> Calls:
    """The two directions of a call."""
    layout, mask = arguments.get("layout", "bshd"), arguments["mask"]
    lengths = settle(layout, tuple(arguments.get(name) for name in LENGTHS))
    optional = {**dict.fromkeys(OPTIONAL), **dict(zip(LENGTHS, lengths, strict=True))}
    rest = (*optional.values(), *Arguments(layout=layout, mask=mask))
    q, k, v = operands
    assert q is not None  # every layout has it
    out, lse = torch.ops.attngen.forward(q, k, v, *rest)[:2]
    d_o = torch.randn_like(out)
    return {
        "fwd": lambda: attngen.attention(q, k, v, **arguments, backend="cuda"),
        "bwd": lambda: torch.ops.attngen.backward(d_o, None, q, k, v, out, lse, *rest),
    }


def packed(lens: Sequence[int], dim: int, mask: str) -> Calls:
    lengths = int32([0, *itertools.accumulate(lens)])
    q, k, v = (randn(sum(lens), HEADS, dim) for _ in range(3))
    arguments = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "mask": mask}
    return ours((q, k, v), layout="thd", **arguments)


def flash_3(lens: Sequence[int], dim: int, causal: bool) -> Calls:
    """FlashAttention-3's kernels for packed sequences, the longest length told."""
    operator, most = torch.ops.flash_attn_3, max(lens)
    lengths = int32([0, *itertools.accumulate(lens)])
    q, k, v, d_o = (randn(sum(lens), HEADS, dim) for _ in range(4))

    def forward() -> Any:
        return operator.fwd(
            *(q, k, v, None, None, None, None, lengths, lengths, None, None, None, most, most),
            *(None,) * 9, dim**-0.5, causal, -1, -1, 0, 0.0, True, None, 1, None, 0,
        )  # fmt: skip

    out, lse, *_ = forward()

    def backward() -> Any:
        return operator.bwd(
            d_o, q, k, v, out, lse, None, None, None, lengths, lengths, None, None, most, most,
            dim**-0.5, causal, -1, -1, 0.0, False, 0,
        )  # fmt: skip

    return {"fwd": forward, "bwd": backward}


def groups(dim: int) -> Iterator[tuple[str, dict[str, Calls], dict[str, float]]]:
    """Name, calls by direction, and FLOPs of a forward by call."""
    fa3 = os.environ.get("FA3_SO")
    if fa3:
        torch.ops.load_library(fa3)
    for mask, half in (("causal", 2), ("none", 1)):
        lens = mixed_lengths()
        calls = {"thd": packed(lens, dim, mask)}
        if fa3:
            calls["fa3"] = flash_3(lens, dim, mask == "causal")
        yield f"mix {mask}", calls, dict.fromkeys(calls, work(lens, dim) / half)
        for batch, length in ((4, 4096), (16, 1024)):
            lens = [length] * batch
            dense = [randn(batch, length, HEADS, dim) for _ in range(3)]
            used = int32([length // 2] * batch)
            shorter = [x[:, : length // 2].contiguous() for x in dense]
            other = {
                "bshd": ours(dense, mask=mask),
                "thd": packed(lens, dim, mask),
                "padding": ours(dense, mask=mask, seqused_q=used, seqused_kv=used),
                "half": ours(shorter, mask=mask),
                **{name: ours(in_layout(name, dense), mask=mask, layout=name)
                   for name in ("sbhd", "bs3hd", "bsh3d", "bshd_bs2hd")},
            }  # fmt: skip
            flops = dict.fromkeys(other, work(lens, dim) / half)
            flops |= dict.fromkeys(("padding", "half"), work([length // 2] * batch, dim) / half)
            yield f"b{batch} s{length} {mask}", other, flops


def in_layout(name: str, dense: Sequence[Tensor]) -> list[Tensor | None]:
    """bshd operands as the layout has them."""
    layout = layouts.parse(name)
    if layout.q_format == "sbhd":
        return [x.transpose(0, 1).contiguous() for x in dense]
    found: dict[str, Tensor | None] = dict(zip("qkv", dense, strict=True))
    carrier, axis, _ = layout.home("v")
    found[carrier] = torch.stack(
        [x for n in layout.packed_operands if (x := found[n]) is not None], axis
    )
    return [found[n] if layout.home(n)[0] == n else None for n in "qkv"]


def work(lens: Sequence[int], dim: int) -> float:
    """FLOPs of a forward without a mask."""
    return 4.0 * HEADS * dim * sum(n * n for n in lens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=20)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    rows: list[dict[str, Any]] = []
    report = {"date": date, "machine": to_data(describe_machine()), "heads": HEADS,
              "head_dim": 128, "rounds": arguments.rounds, "rows": rows}  # fmt: skip
    for name, calls, flops in groups(128):
        if arguments.only not in name:
            continue
        for direction, factor in (("fwd", 1.0), ("bwd", 2.5)):
            times = time_interleaved(
                {n: call[direction] for n, call in calls.items()},
                arguments.rounds, arguments.budget_ms,
            )  # fmt: skip
            speeds = {n: round(factor * flops[n] / t / 1e9, 1) for n, t in times.items()}
            rows.append({"case": name, "direction": direction, "tflops": speeds,
                         "milliseconds": {n: round(t, 4) for n, t in times.items()}})  # fmt: skip
            print(f"{name:18} {direction} " + " ".join(f"{n} {x}" for n, x in speeds.items()))
            if arguments.output:  # with each row: a run that is ended keeps them
                arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
