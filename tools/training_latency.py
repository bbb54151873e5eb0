r"""Times how long parts of a training step keep the host, on one GPU, and writes it as JSON.

    ATTNGEN_FA3_LIBRARY=path/to/flash_attn_3/_C.so python tools/training_latency.py \
        -o docs/results/training-latency.json

Microseconds of a call that is differentiated, forward and backward each, of attngen, of
FlashAttention-3 as a function of autograd around its two operators, and of PyTorch's attention with
each backend. The problem is so small that the GPU is done before the host is, so that the host does
not wait. Backwards are those of one graph again and again. One process, the order shuffled every
round; medians. A peer without a variant is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import attngen  # noqa: E402
from attngen.bench.peers import Absent, load_fa3_operators  # noqa: E402

CALLS, WARM_UP = 100, 20
SHAPE = BATCH, LENGTH, HEADS, DIM = 1, 128, 2, 64
WINDOW, DROPOUT = 32, 0.1
LENGTHS = (48, 80)  # of packed sequences
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Step(NamedTuple):
    """A forward, the leaves that want gradients, and what is around both."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    around: Callable[[], Any] = nullcontext


def randn(*shape: int) -> Tensor:
    """A bf16 leaf."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def ends() -> Tensor:
    """`cu_seqlens` of LENGTHS."""
    starts = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    return torch.tensor(starts, dtype=torch.int32, device="cuda")


def ours() -> dict[str, Step]:
    """Calls of attngen."""
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "deterministic": {"deterministic": True},
        "window": {"window": (WINDOW, 0)},
        "packed": {"cu_seqlens_q": (offsets := ends()), "cu_seqlens_kv": offsets},
        "bias": {"bias": randn(1, HEADS, LENGTH, LENGTH)},
        "dropout": {"dropout_p": DROPOUT},
    }
    steps = {}
    for name, given in variants.items():
        packed = name == "packed"
        shape = (LENGTH, HEADS, DIM) if packed else SHAPE
        leaves = tuple(randn(*shape) for _ in "qkv")
        given = {"mask": "padding_causal" if packed else "causal", **given}
        given["layout"] = "thd" if packed else "bshd"

        def forward(leaves: Any = leaves, given: Any = given) -> Tensor:
            result: Any = attngen.attention(*leaves, **given, backend="cuda")
            return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

        steps[name] = Step(forward, (*leaves, *([given["bias"]] if "bias" in given else [])))
    return steps


class FlashAttention3(torch.autograd.Function):
    """Its operators as its own package calls them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, operators: Any, options: tuple[Any, ...]
    ) -> Tensor:
        window, ordered, offsets, longest = options
        scale = q.shape[-1] ** -0.5
        ends = (offsets, offsets, None, None, None, longest, longest)
        out, lse, *_ = operators.fwd(
            *(q, k, v, None, None, None, None, *ends, *[None] * 6, None, None, None, scale, True),
            *(window, 0 if window >= 0 else -1, 0, 0.0, True, None, 1, None, 0),
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets)
        ctx.rest = operators, scale, window, ordered, longest
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, offsets = ctx.saved_tensors
        operators, scale, window, ordered, longest = ctx.rest
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        operators.bwd(
            *(d_o, q, k, v, out, lse, dq, dk, dv, offsets, offsets, None, None, longest, longest),
            *(scale, True, window, 0 if window >= 0 else -1, 0.0, ordered, 0),
        )
        return dq, dk, dv, None, None


def flash_attention_3() -> dict[str, Step]:
    """Calls of FlashAttention-3. Raises: Absent."""
    _, operators = load_fa3_operators()
    variants: dict[str, tuple[Any, ...]] = {
        "plain": (-1, False, None, None),
        "deterministic": (-1, True, None, None),
        "window": (WINDOW, False, None, None),
        "packed": (-1, False, ends(), max(LENGTHS)),
    }
    steps = {}
    for name, given in variants.items():
        leaves = tuple(randn(*(SHAPE[1:] if name == "packed" else SHAPE)) for _ in "qkv")
        steps[name] = Step(partial(FlashAttention3.apply, *leaves, operators, given), leaves)
    return steps


def of_torch(backend: str) -> dict[str, Step]:
    """Calls of PyTorch's attention, [b, h, s, d]."""
    bias = randn(1, HEADS, LENGTH, LENGTH)
    variants: dict[str, dict[str, Any]] = {
        "plain": {"is_causal": True},
        "bias": {"attn_mask": bias},
        "dropout": {"is_causal": True, "dropout_p": DROPOUT},
    }
    steps = {}
    for name, given in variants.items():
        leaves = tuple(randn(BATCH, HEADS, LENGTH, DIM) for _ in "qkv")
        attention: Callable[..., Tensor] = scaled_dot_product_attention
        forward = partial(attention, *leaves, **given)
        around = partial(sdpa_kernel, BACKENDS[backend])
        steps[name] = Step(forward, (*leaves, *([bias] if name == "bias" else [])), around)
    return steps


def parts_of(who: str, steps: dict[str, Step]) -> dict[str, tuple[Callable[[], Any], Any]]:
    """Make the timed parts, each with its context, by `variant, part, who`, and call them."""
    parts: dict[str, tuple[Callable[[], Any], Any]] = {}
    for variant, step in steps.items():
        try:
            with step.around():
                out = step.forward()
                d_o = torch.randn_like(out)
                backward = partial(torch.autograd.grad, out, step.leaves, d_o, retain_graph=True)
                calls: dict[str, Callable[[], Any]]
                calls = {"forward": step.forward, "backward": backward}
                for call in calls.values():
                    for _ in range(WARM_UP):
                        call()
            torch.cuda.synchronize()
        except Exception as error:  # a peer refuses in its own way
            print(f"{who}, {variant}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            continue
        parts |= {f"{variant}, {part}, {who}": (call, step.around) for part, call in calls.items()}
    return parts


def measure(rounds: int, peers: bool) -> dict[str, float]:
    """Medians, microseconds a call."""
    parts = parts_of("attngen", ours())
    if peers:
        try:
            parts |= parts_of("fa3", flash_attention_3())
        except Absent as reason:
            print(f"fa3: {reason}", file=sys.stderr)
        for backend in BACKENDS:
            parts |= parts_of(f"torch {backend}", of_torch(backend))
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name in random.sample(list(parts), len(parts)):
            call, around = parts[name]
            with around():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    host_us = measure(options.rounds, options.peers)
    for name, figure in host_us.items():
        print(f"{name:36s} {figure:8.1f}")
    if options.output:
        from attngen.bench.machine import describe_machine
        from attngen.io.values import to_data

        about = {**to_data(describe_machine()), "rounds": options.rounds}
        options.output.write_text(json.dumps({**about, "host_us": host_us}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
