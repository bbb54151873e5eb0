"""Times variants of attention beside the peers that have them, on one GPU, as JSON.

    ATTNGEN_FA3_LIBRARY=path/to/flash_attn_3/_C.so python tools/variant_peers.py \
        -o docs/results/variant-peers.json

The variants and the shape of tools/variant_speed.py, on the same operands: cuDNN by its frontend,
FlashAttention-3's operators, FlashAttention-4, FlexAttention compiled. Interleaved rounds, medians.
A peer's results are compared with attngen's first, but for dropout, whose bits are each one's own;
a peer without a variant, or with another result, is named with the reason.
docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402
from attngen.bench.peers import Absent, describe, load_fa3_operators  # noqa: E402
from attngen.bench.timing import Call, time_interleaved  # noqa: E402
from attngen.reference.core import default_alibi_slopes  # noqa: E402
from tools.cudnn_graph import cudnn_call  # noqa: E402
from tools.reports import timing_of, write_rows  # noqa: E402
from tools.variant_speed import (  # noqa: E402
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    VARIANTS,
    WINDOW,
    Operands,
    operands_of,
)

SCHEMA = 1
TOLERANCE = 0.02  # of the largest of a result: both round to bf16, and order sums their own way
UNCOMPARED = ("dropout",)
SCALE = HEAD_DIM**-0.5
DIRECTIONS = ("fwd", "bwd")
BROKE = "left out: an illegal memory access"


class Both(NamedTuple):
    """A variant's calls: the forward gives o, the backward the gradients of q, k and v first."""

    forward: Call
    backward: Call


Maker = Callable[[str, Operands], Both]  # raises Absent where it has no such variant
Source = str  # the package and version that are called


def ours(_: str, x: Operands) -> Both:
    return differentiated(
        lambda: attngen.attention(x.q, x.k, x.v, mask="causal", backend="cuda", **x.given), x
    )


def differentiated(attend: Callable[[], Any], x: Operands) -> Both:
    """Make both passes of a forward that autograd knows."""
    made = attend()
    out = made[0] if isinstance(made, tuple) else made

    def forward() -> object:
        with torch.no_grad():
            made = attend()
        return made[0] if isinstance(made, tuple) else made

    return Both(
        forward, lambda: torch.autograd.grad(out, x.differentiated, x.d_o, retain_graph=True)
    )


def load_cudnn() -> tuple[Source, Maker]:
    cudnn: Any = import_module("cudnn")
    number = cudnn.backend_version()
    backend = f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
    source = f"cuDNN {backend} through cudnn-frontend {cudnn.__version__}"
    return source, partial(cudnn_calls, cudnn, cudnn.create_handle())


def cudnn_calls(cudnn: Any, handle: Any, name: str, x: Operands) -> Both:
    """A graph for the forward, which leaves the log-sum-exp, too, and one for the backward. Results
    are written in place."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "alibi": {"use_alibi_mask": True},
        "window": {"diagonal_band_left_bound": WINDOW + 1},
        **dict.fromkeys(("sink", "bias", "bias of keys", "dropout"), {}),
    }
    if name not in options:
        raise Absent("cuDNN has no such variant")
    q, k, v, d_o = (each.detach().transpose(1, 2) for each in (x.q, x.k, x.v, x.d_o))
    o, stats = torch.empty_like(q), q.new_empty(BATCH, HEADS, LENGTH, 1, dtype=torch.float32)
    more: dict[str, Tensor] = {}  # both directions read them
    gradients: dict[str, Tensor] = {}
    if "bias" in x.given:
        more["bias"] = x.given["bias"].detach()
        gradients["dBias"] = torch.empty_like(more["bias"])
    if "sink" in x.given:
        more["sink_token"] = x.given["sink"].detach().view(1, HEADS, 1, 1)
        gradients["dSink_token"] = torch.empty_like(more["sink_token"])
    drops = x.given["dropout_p"] if name == "dropout" else 0.0
    band = {**options[name], "diagonal_band_right_bound": 0, "attn_scale": SCALE}
    make: Callable[..., Call] = partial(cudnn_call, cudnn, handle, drops=drops, **band)
    operands = {"q": q, "k": k, "v": v}
    forward = make("sdpa", {**operands, **more}, {"O": o, "Stats": stats}, generate_stats=True)
    forward()
    beside = {"o": o, "dO": d_o, "stats": stats}
    dq, dk, dv = (torch.empty_like(each) for each in (q, k, v))
    backward = make(
        "sdpa_backward", {**operands, **beside, **more, **gradients},
        {"dQ": dq, "dK": dk, "dV": dv},
    )  # fmt: skip
    return Both(forward, backward)


def load_fa3() -> tuple[Source, Maker]:
    source, operators = load_fa3_operators()
    options: dict[str, dict[str, Any]] = {
        "plain": {"is_causal": True},
        "window": {"is_causal": False, "window_size_left": WINDOW, "window_size_right": 0},
        "softcap": {"is_causal": True, "softcap": VARIANTS["softcap"]["softcap"]},
    }

    def make(name: str, x: Operands) -> Both:
        if name not in options:
            raise Absent("FlashAttention-3 has no such variant")
        q, k, v = (each.detach() for each in (x.q, x.k, x.v))
        out, lse, *_ = operators.fwd(q, k, v, num_splits=1, **options[name])
        return Both(
            lambda: operators.fwd(q, k, v, num_splits=1, **options[name])[0],
            lambda: operators.bwd(x.d_o, q, k, v, out, lse, **options[name])[:3],
        )

    return source, make


def load_fa4() -> tuple[Source, Maker]:
    function = import_module("flash_attn.cute").flash_attn_func

    def make(name: str, x: Operands) -> Both:
        options: dict[str, dict[str, Any]] = {
            "plain": {"causal": True},
            "window": {"window_size": (WINDOW, 0)},
            "softcap": {"causal": True, "softcap": VARIANTS["softcap"]["softcap"]},
            "sink": {"causal": True},
        }
        if name not in options:
            raise Absent("FlashAttention-4 has no such variant")
        more = {}
        if name == "sink":
            more["learnable_sink"] = x.given["sink"].detach().bfloat16()
        attend = partial(function, x.q, x.k, x.v, **options[name], **more)
        both = differentiated(attend, Operands(x.q, x.k, x.v, x.d_o, {}))
        return both._replace(backward=refuse("no gradient of a sink")) if more else both

    return f"flash_attn.cute {version('flash-attn-4')}", make


def refuse(reason: str) -> Call:
    def call() -> object:
        raise Absent(reason)

    return call


def load_flex() -> tuple[Source, Maker]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = default_alibi_slopes(HEADS, "cuda")

    def make(name: str, x: Operands) -> Both:
        bias: Any
        mask: Any
        cap: Any
        bias, mask, cap = (x.given.get(each) for each in ("bias", "attn_mask", "softcap"))

        def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j

        def windowed(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j <= WINDOW)

        def masked(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & mask[i, j]

        scores: dict[str, Any] = {
            "plain": None,
            "window": None,
            "mask": None,
            "alibi": lambda s, b, h, i, j: s + slopes[h] * (j - i),
            "softcap": lambda s, b, h, i, j: cap * torch.tanh(s / cap),
            "bias": lambda s, b, h, i, j: s + bias[0, h, i, j],
            "pre_scale bias": lambda s, b, h, i, j: s + bias[0, h, i, j] * SCALE,
            "bias of keys": lambda s, b, h, i, j: s + bias[0, 0, 0, j],
        }
        if name not in scores:
            raise Absent("FlexAttention has no such variant")
        torch.compiler.reset()  # past a number of variants it would silently stop compiling
        compiled = torch.compile(flex_attention, dynamic=False)
        visible = {"window": windowed, "mask": masked}.get(name, causal)
        blocks = create_block_mask(visible, None, None, LENGTH, LENGTH, "cuda")
        q, k, v = (each.transpose(1, 2) for each in (x.q, x.k, x.v))

        def attend() -> Tensor:
            out: Tensor = compiled(q, k, v, score_mod=scores[name], block_mask=blocks)
            return out.transpose(1, 2)

        return differentiated(attend, x)

    return f"torch {torch.__version__}, compiled", make


LOADERS: dict[str, Callable[[], tuple[Source, Maker]]] = {
    "cudnn": load_cudnn,
    "fa3": load_fa3,
    "fa4": load_fa4,
    "flex": load_flex,
}


def results_of(call: Call) -> list[Tensor]:
    """The output, or the gradients of q, k and v."""
    made = call()
    return list(made)[:3] if isinstance(made, list | tuple) else [made]  # type: ignore[list-item]


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raises: Absent where results differ by more than rounding does."""
    names = ("dq", "dk", "dv") if len(expected) > 1 else ("o",)
    for name, one, other in zip(names, found, expected, strict=True):
        error = float((one.float() - other.float()).abs().max() / other.float().abs().max())
        if not error <= TOLERANCE:  # so that NaN is wrong
            raise Absent(f"wrong result: {name} is off by {error:.3f} of its largest")


def load_makers(
    names: list[str],
) -> tuple[dict[str, Source], dict[str, Maker], dict[str, str]]:
    """Load the makers of peers by name, and say why the others are absent."""
    sources: dict[str, Source] = {}
    makers: dict[str, Maker] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            sources[name], makers[name] = LOADERS[name]()
        except Exception as error:  # a package that is broken is as good as absent
            absent[name] = reason_of(error)
    return sources, makers, absent


def require_device(who: str) -> None:
    """Raises: SystemExit where a call has left the device unusable."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise SystemExit(f"{who} broke the device ({describe(error)}): leave it out") from None


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, Absent) else describe(error)


def measure(makers: dict[str, Maker], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a variant and direction."""
    for variant in options.variants:
        x = operands_of(VARIANTS[variant])
        made = {"attngen": ours(variant, x)}
        missing: dict[str, str] = {}
        for name, make in makers.items():
            try:
                if f"{name}:{variant}" in options.without:
                    raise Absent(BROKE)
                made[name] = make(variant, x)
            except Exception as error:
                require_device(f"{name} in {variant}")
                missing[name] = reason_of(error)
        for index, direction in enumerate(DIRECTIONS):
            calls, lacking = {}, dict(missing)
            expected = results_of(made["attngen"][index])
            for name, both in made.items():
                try:
                    found = results_of(both[index])
                    if variant not in UNCOMPARED:
                        compare(found, expected)
                    calls[name] = both[index]
                except Exception as error:
                    require_device(f"{name} in {variant}, {direction}")
                    lacking[name] = reason_of(error)
            row = row_of(direction, variant, calls, lacking, options)
            print(line_of(row), flush=True)
            yield row


def row_of(
    direction: str,
    variant: str,
    calls: dict[str, Call],
    missing: dict[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    taken = time_interleaved(calls, options.rounds, options.budget_ms, settle_ms=options.settle_ms)
    flops = (4, 10)[direction == "bwd"] * BATCH * HEADS * LENGTH**2 * HEAD_DIM / 2
    others = {name: ms for name, ms in taken.items() if name != "attngen"}
    best = min(others, key=others.__getitem__) if others else None
    return {
        "direction": direction,
        "variant": variant,
        "ms": {name: round(ms, 4) for name, ms in taken.items()},
        "tflops": {name: round(flops / ms / 1e9, 1) for name, ms in taken.items()},
        "best_peer": best,
        "ratio": round(others[best] / taken["attngen"], 3) if best else None,
        "missing": missing,
    }


def line_of(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{name} {speed:6.1f}" for name, speed in row["tflops"].items())
    lacking = "; ".join(f"{name}: {reason}" for name, reason in row["missing"].items())
    return f"{row['direction']} {row['variant']:<20} {row['ratio']} | {speeds} | {lacking}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-ms", type=float, default=20)
    parser.add_argument("--budget-ms", type=float, default=20)
    parser.add_argument("--peers", nargs="+", default=list(LOADERS), choices=LOADERS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="PEER:VARIANT", help="that break the device"
    )
    options = parser.parse_args()
    sources, makers, absent = load_makers(options.peers)
    write_rows(
        options.output,
        SCHEMA,
        measure(makers, options),
        case=f"b{BATCH} s{LENGTH} h{HEADS} d{HEAD_DIM} causal bf16",
        **timing_of(options),
        peers=sources,
        absent=absent,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
