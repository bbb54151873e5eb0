"""Measures how far FP8 attention is from float64 and writes it as JSON: attngen's kernels, the
reference's emulation, and cuDNN through cudnn-frontend where that is installed.

    python tools/fp8_accuracy.py -o docs/results/fp8-accuracy.json

Everyone gets the same e4m3 operands, scaled to their largest element, weights stored with the same
scale_s, and outputs of one dtype, e4m3 scaled to its largest element as well. Errors count against
float64 of what the operands stand for, and against float64 of the numbers that were stored in them.
docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import attngen  # noqa: E402  # a checkout not installed, too
from attngen import reference  # noqa: E402
from attngen.bench.peers import describe  # noqa: E402
from attngen.errors import AttngenError  # noqa: E402
from attngen.io.values import to_data  # noqa: E402
from attngen.reference import fp8  # noqa: E402
from tools.cudnn_graph import CudnnGraph  # noqa: E402
from tools.reports import write_report  # noqa: E402

SCHEMA = 1
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
OUTPUTS = {"bf16": torch.bfloat16, "e4m3": E4M3}
OUTLIERS, OUTLIER_FACTOR = 1e-3, 10.0


@dataclass(frozen=True)
class Case:
    """One set of inputs: standard normal q, k and v, [1, s, heads, head_dim]."""

    inputs: str
    head_dim: int
    heads: int
    s_q: int
    s_kv: int
    mask: str = "none"
    outliers: bool = False
    positive_v: bool = False

    def originals(self, device: torch.device) -> dict[str, Tensor]:
        """q, k and v in float32."""
        generator = torch.Generator(device).manual_seed(0)
        found = {}
        for name, length in (("q", self.s_q), ("k", self.s_kv), ("v", self.s_kv)):
            shape = (1, length, self.heads, self.head_dim)
            x = torch.randn(shape, generator=generator, device=device)
            chosen = torch.rand(shape, generator=generator, device=device) < OUTLIERS
            found[name] = torch.where(chosen, x * OUTLIER_FACTOR, x) if self.outliers else x
        if self.positive_v:
            found["v"] = found["v"].abs()
        return found


@dataclass(frozen=True)
class Call:
    """The operands and scales of an FP8 attention; scales are float32 [1]."""

    case: Case
    stored: dict[str, Tensor]
    descales: dict[str, Tensor]
    out_dtype: torch.dtype
    scale_o: Tensor | None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `attngen.attention`."""
        scale_s = torch.tensor([fp8.DEFAULT_SCALE_S], device=self.stored["q"].device)
        named = {f"descale_{name}": descale for name, descale in self.descales.items()}
        return {
            **{**self.stored, **named, "scale_s": scale_s, "descale_s": 1 / scale_s},
            **{"mask": self.case.mask, "out_dtype": self.out_dtype, "scale_o": self.scale_o},
        }


Runner = Callable[[Call], Tensor]  # the output, bshd, as it is stored


def cases(length: int, keys: int, heads: int) -> list[Case]:
    """Normal numbers, full and causal; some of them ten times as large; a few queries on many
    keys, and these with values of one sign, so that what a sum loses in each step cannot cancel."""
    found = []
    for d in (64, 128, 256):
        square, long = (d, heads, length, length), (d, heads, min(256, keys), keys)
        found += [
            Case("normal", *square),
            Case("normal", *square, mask="causal"),
            Case("outliers", *square, outliers=True),
            Case("long keys", *long),
            Case("long keys", *long, positive_v=True),
        ]
    return found


def store(originals: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The e4m3 forms, each with its largest element at e4m3's, and their descales."""
    descales = {name: (x.abs().max() / LARGEST)[None] for name, x in originals.items()}
    stored = {name: fp8.quantise(x, E4M3, 1 / descales[name]) for name, x in originals.items()}
    return stored, descales


def float64_output(tensors: dict[str, Tensor], mask: str) -> Tensor:
    q, k, v = (tensors[name].double() for name in "qkv")
    return reference.attention(q, k, v, mask=mask)[0]


def measure(case: Case, runners: dict[str, Runner], device: torch.device) -> list[dict[str, Any]]:
    """A row for each output dtype and each runner."""
    originals = case.originals(device)
    stored, descales = store(originals)
    meant = {name: x.double() * descales[name].double() for name, x in stored.items()}
    exact, unstored = float64_output(meant, case.mask), float64_output(originals, case.mask)
    rows = []
    for dtype, out_dtype in OUTPUTS.items():
        scale_o = (LARGEST / exact.abs().max()).float()[None] if out_dtype == E4M3 else None
        call = Call(case, stored, descales, out_dtype, scale_o)
        for who, run in runners.items():
            row = {**to_data(case), "output": dtype, "who": who}
            try:
                found = run(call).double() / (1 if scale_o is None else scale_o.double())
            except (AttngenError, RuntimeError) as error:
                rows.append({**row, "missing": describe(error)})
                continue
            rows.append({**row, **errors(found, exact, unstored)})
    return rows


def errors(found: Tensor, exact: Tensor, unstored: Tensor) -> dict[str, float]:
    """Root mean square and largest, and the root mean square of what should be there."""

    def rms(x: Tensor) -> float:
        return float(x.square().mean().sqrt())

    figures = {
        "rms": rms(exact),
        "rmse": rms(found - exact),
        "max_error": float((found - exact).abs().max()),
        "rmse_to_originals": rms(found - unstored),
    }
    return {name: float(f"{figure:.4g}") for name, figure in figures.items()}


def run_kernels(call: Call) -> Tensor:
    out = attngen.attention(**call.arguments, backend="cuda")
    assert isinstance(out, Tensor)  # no by-product was asked for
    return out


def run_emulation(call: Call) -> Tensor:
    return reference.attention(**call.arguments)[0]


def cudnn_runner(cudnn: Any) -> Runner:
    """cuDNN's FP8 forward, from a graph that is built for each call."""
    build = cudnn_builder(cudnn)

    def run(call: Call) -> Tensor:
        out = build(call)()
        torch.cuda.synchronize()
        return out

    return run


def cudnn_builder(cudnn: Any) -> Callable[[Call], Callable[[], Tensor]]:
    """Makes of a call what launches cuDNN's FP8 forward and returns its output; raises RuntimeError
    where it has none."""
    handle = cudnn.create_handle()

    def build(call: Call) -> Callable[[], Tensor]:
        graph = CudnnGraph(cudnn, handle, E4M3)
        device = call.stored["q"].device
        arguments = call.arguments
        one = torch.ones(1, device=device)
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scales = {n: one if arguments[n] is None else arguments[n] for n in names}
        nodes = {n: graph.take(n, x.transpose(1, 2)) for n, x in call.stored.items()}
        nodes |= {n: graph.take(n, x.view(1, 1, 1, 1)) for n, x in scales.items()}
        causal = {"use_causal_mask": True} if call.case.mask == "causal" else {}
        scale = call.case.head_dim**-0.5
        results = graph.graph.sdpa_fp8(**nodes, attn_scale=scale, generate_stats=True, **causal)
        out = torch.empty(call.stored["q"].shape, device=device, dtype=call.out_dtype)
        batch, s_q, heads, _ = out.shape
        stats = torch.empty(batch, heads, s_q, 1, device=device)
        maxima = [torch.zeros(1, 1, 1, 1, device=device) for _ in range(2)]
        for node, tensor in zip(results, (out.transpose(1, 2), stats, *maxima), strict=True):
            graph.give(node, tensor)
        launch = graph.compiled()

        def execute() -> Tensor:
            launch()
            return out

        return execute

    return build


def find_runners(device: torch.device) -> tuple[dict[str, Runner], dict[str, str], dict[str, str]]:
    """Who can run here, with their versions, and why the others cannot."""
    runners: dict[str, Runner] = {"emulation": run_emulation}
    versions = {"emulation": f"attngen {attngen.__version__}, torch {torch.__version__}"}
    absent: dict[str, str] = {}
    if device.type != "cuda":
        return runners, versions, dict.fromkeys(("attngen", "cudnn"), "needs a CUDA device")
    runners["attngen"], versions["attngen"] = run_kernels, f"attngen {attngen.__version__}"
    try:
        import cudnn  # type: ignore[import-not-found]

        runners["cudnn"] = cudnn_runner(cudnn)
        number = cudnn.backend_version()
        versions["cudnn"] = f"cuDNN {number}, cudnn-frontend {cudnn.__version__}"
    except Exception as error:  # a package that is broken is as good as absent
        absent["cudnn"] = describe(error)
    return runners, versions, absent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--length", type=int, default=4096, help="positions where q and k have one")
    parser.add_argument("--keys", type=int, default=65536, help="where keys are many")
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runners, versions, absent = find_runners(device)
    rows = []
    for case in cases(options.length, options.keys, options.heads):
        for row in measure(case, runners, device):
            rows.append(row)
            figures = row.get("missing") or f"rmse {row['rmse']:.3g}  max {row['max_error']:.3g}"
            inputs = row["inputs"] + ", v > 0" * row["positive_v"]
            names = f"{inputs:16s} {row['mask']:7s} d{row['head_dim']:<4d} {row['output']}"
            print(f"{names:36s} {row['who']:10s} {figures}", flush=True)
    if options.output:
        named = {"versions": versions, "absent": absent, "rows": rows}
        write_report(options.output, SCHEMA, scale_s=fp8.DEFAULT_SCALE_S, **named)
    return 0


if __name__ == "__main__":
    sys.exit(main())
