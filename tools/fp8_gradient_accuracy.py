"""Measures how far gradients of FP8 attention are from float64 and writes them as JSON: attngen's
kernels, the definition's emulation, and cuDNN through cudnn-frontend where that is installed.

    python tools/fp8_gradient_accuracy.py -o docs/results/fp8-gradient-accuracy.json

Everyone gets the same e4m3 q, k, v and output and the same e5m2 gradient of the output, each scaled
to its largest element, the same log-sum-exp and the same scales of the weights and of dS. Errors
are in per cent of the root mean square of float64's gradients: of what the operands stand for, and
of the numbers that were stored in them. docs/results/README.md says what the fields mean.
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

import attngen.frontends.pytorch.fp8_backward  # noqa: E402, F401  # registers the operation
from attngen import reference  # noqa: E402  # a checkout not installed, too
from attngen.bench.peers import describe  # noqa: E402
from attngen.errors import AttngenError  # noqa: E402
from attngen.io.values import to_data  # noqa: E402
from attngen.reference import fp8  # noqa: E402
from attngen.reference.fp8_backward import power_of_two  # noqa: E402
from attngen.reference.fp8_scales import scale_of  # noqa: E402
from tools import fp8_accuracy  # noqa: E402
from tools.cudnn_graph import CudnnGraph  # noqa: E402
from tools.reports import write_report  # noqa: E402

SCHEMA = 1
E4M3, E5M2 = fp8.DTYPES
NAMES = ("dq", "dk", "dv")
OUTPUTS = {"bf16": torch.bfloat16, "e5m2": E5M2}
SINK = 4.0  # by how much every query of trained-like inputs has the first key's direction in it
D_O_SIZE = 1e-4


@dataclass(frozen=True)
class Case(fp8_accuracy.Case):
    """One set of inputs: standard normal q, k, v and d_o, [1, s, heads, head_dim].

    trained: as trained models have them instead: channels of q, k and v whose sizes are log-normal,
    a first key that all queries look at, and small gradients with heavy tails.
    """

    trained: bool = False

    def originals(self, device: torch.device) -> dict[str, Tensor]:
        """q, k, v and d_o in float32."""
        found = super().originals(device)
        generator = torch.Generator(device).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        d_o = normal(*found["q"].shape)
        if self.outliers:
            chosen = normal(*d_o.shape) > 3.09  # one in a thousand
            d_o = torch.where(chosen, d_o * fp8_accuracy.OUTLIER_FACTOR, d_o)
        if self.trained:
            sizes = normal(3, self.heads, self.head_dim).exp().unbind()
            for name, size in zip("qkv", sizes, strict=True):
                found[name] *= size / size.square().mean().sqrt()
            first = found["k"][:, :1]
            found["q"] += SINK * first / first.norm(dim=-1, keepdim=True)
            d_o = D_O_SIZE * d_o * normal(*d_o.shape[:-1], 1).exp()
        return {**found, "d_o": d_o}


@dataclass(frozen=True)
class Call:
    """Operands and scales of an FP8 backward; scales are float32 [1].

    stored: q, k, v, o and d_o; descales: what their numbers stand for. scales: of the weights, of
    dS and of the gradients that are stored in 8 bits. out_dtype: the gradients'.
    """

    case: Case
    stored: dict[str, Tensor]
    descales: dict[str, Tensor]
    lse: Tensor
    scales: dict[str, Tensor]
    out_dtype: torch.dtype

    @property
    def of_gradients(self) -> dict[str, Tensor]:
        """Scales of gradients that have 8 bits."""
        return {f"scale_{n}": self.scales[n] for n in NAMES} if fp8.is_fp8(self.out_dtype) else {}

    @property
    def of_forward(self) -> dict[str, Any]:
        """Arguments that the forward had."""
        scale_s = self.scales["s"]
        named = {f"descale_{name}": self.descales[name] for name in "qkv"}
        return {**named, "scale_s": scale_s, "descale_s": 1 / scale_s, "mask": self.case.mask}

    @property
    def of_backward(self) -> dict[str, Tensor]:
        """Scales that a backward alone has."""
        scale_dp = self.scales["dp"]
        descales = {f"descale_{name}": self.descales[n] for name, n in (("o", "o"), ("do", "d_o"))}
        return {**descales, "scale_dp": scale_dp, "descale_dp": 1 / scale_dp, **self.of_gradients}


Runner = Callable[[Call], tuple[Tensor, ...]]  # dq, dk and dv, bshd, as they are stored


def cases(length: int, keys: int, heads: int) -> list[Case]:
    """Normal numbers, full and causal, some ten times as large, those of trained models, and a few
    queries on many keys."""
    found = []
    for d in (64, 128):
        square = (d, heads, length, length)
        found += [
            Case("normal", *square),
            Case("normal", *square, mask="causal"),
            Case("outliers", *square, mask="causal", outliers=True),
            Case("trained", *square, mask="causal", trained=True),
            Case("long keys", d, heads, min(256, keys), keys),
        ]
    return found


def exact_of(case: Case, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Output and gradients of q, k and v in float64."""
    q, k, v = (tensors[name].double().requires_grad_() for name in "qkv")
    out, _ = reference.attention(q, k, v, mask=case.mask)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), tensors["d_o"].double()))


def stored_by(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor with its largest element at the dtype's, and what its numbers stand for."""
    scale = scale_of(x.abs().max()[None], dtype, 1.0)
    return fp8.quantise(x.float(), dtype, scale), scale.reciprocal()


def measure(case: Case, runners: dict[str, Runner], device: torch.device) -> list[dict[str, Any]]:
    """A row for each dtype of gradients and each runner."""
    originals = case.originals(device)
    kinds = {"q": E4M3, "k": E4M3, "v": E4M3, "d_o": E5M2}
    pairs = {name: stored_by(x, kinds[name]) for name, x in originals.items()}
    meant = {name: x.double() * descale.double() for name, (x, descale) in pairs.items()}
    unstored = exact_of(case, originals)
    exact = exact_of(case, meant)
    scale_s = torch.tensor([fp8.DEFAULT_SCALE_S], device=device)
    q, k, v = (pairs[name][0] for name in "qkv")
    descales = {f"descale_{name}": pairs[name][1] for name in "qkv"}
    scales_s = {"scale_s": scale_s, "descale_s": 1 / scale_s}
    out, aux = reference.attention(q, k, v, mask=case.mask, **descales, **scales_s)
    pairs["o"] = stored_by(out, E4M3)
    assert aux.lse is not None  # as the reference always returns it
    wide = reference.BackwardOperands(d_o=meant["d_o"], o=exact[0], lse=aux.lse)
    given: dict[str, Any] = {"mask": case.mask, **descales}
    amax_dp = reference.fp8_backward(wide, q, k, v, **given).amax_dp
    scales = {"s": scale_s, "dp": power_of_two(torch.finfo(E5M2).max / amax_dp)}
    for name, gradient in zip(NAMES, exact[1:], strict=True):
        scales[name] = scale_of(gradient.abs().max()[None], E5M2, 1.0)
    stored = {name: x for name, (x, _) in pairs.items()}
    units = {name: descale for name, (_, descale) in pairs.items()}
    rows = []
    for dtype, out_dtype in OUTPUTS.items():
        call = Call(case, stored, units, aux.lse, scales, out_dtype)
        for who, run in runners.items():
            row = {**to_data(case), "gradients": dtype, "who": who}
            rows.append({**row, **_errors_of(run, call, exact[1:], unstored[1:])})
    return rows


def _errors_of(
    run: Runner, call: Call, exact: tuple[Tensor, ...], unstored: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Errors of each gradient, or why there are none."""
    try:
        found = run(call)
    except (AttngenError, RuntimeError) as error:
        return {"missing": describe(error)}
    figures: dict[str, Any] = {"to_stored": {}, "to_originals": {}}
    for name, x, of_stored, of_originals in zip(NAMES, found, exact, unstored, strict=True):
        wide = x.double()
        if call.of_gradients:
            wide = wide / call.scales[name].double()
        figures["to_stored"][name] = relative(wide, of_stored)
        figures["to_originals"][name] = relative(wide, of_originals)
    return figures


def relative(found: Tensor, exact: Tensor) -> float:
    """The root mean square of an error in per cent of that of what should be there."""
    return float(f"{100 * float((found - exact).norm() / exact.norm()):.4g}")


def run_kernels(call: Call) -> tuple[Tensor, ...]:
    x = call.stored
    dtype = str(call.out_dtype).removeprefix("torch.")
    dq, dk, dv, *_ = torch.ops.attngen.fp8_backward(
        *(x["d_o"], None, x["q"], x["k"], x["v"], x["o"], call.lse),
        **call.of_forward,
        out_dtype=dtype,
        **call.of_backward,
    )
    return dq, dk, dv


def run_emulation(call: Call) -> tuple[Tensor, ...]:
    x = call.stored
    arguments: dict[str, Any] = call.of_forward
    scales: dict[str, Any] = call.of_backward
    given = reference.BackwardOperands(
        d_o=x["d_o"], o=x["o"], lse=call.lse, dtype=call.out_dtype, **scales
    )
    found = reference.fp8_backward(given, x["q"], x["k"], x["v"], **arguments)
    assert found.dk is not None and found.dv is not None  # tensors of their own
    return found.dq, found.dk, found.dv


def cudnn_runner(cudnn: Any) -> Runner:
    """cuDNN's FP8 backward, from a graph that is built for each call."""
    handle = cudnn.create_handle()

    def run(call: Call) -> tuple[Tensor, ...]:
        graph = CudnnGraph(cudnn, handle, E4M3)
        x, one = call.stored, torch.ones(1, device=call.lse.device)
        nodes = {n: graph.take(n, x[n].transpose(1, 2)) for n in ("q", "k", "v", "o")}
        nodes |= {"dO": graph.take("dO", x["d_o"].transpose(1, 2))}
        nodes |= {"stats": graph.take("stats", call.lse.contiguous()[..., None])}
        scales = {f"descale_{n}": call.descales[n] for n in ("q", "k", "v", "o")}
        scales |= {"descale_dO": call.descales["d_o"]}
        for name, n in (("s", "s"), ("dP", "dp")):
            scales |= {f"scale_{name}": call.scales[n], f"descale_{name}": 1 / call.scales[n]}
        for name, n in (("dQ", "dq"), ("dK", "dk"), ("dV", "dv")):
            scales[f"scale_{name}"] = call.of_gradients.get(f"scale_{n}", one)
        nodes |= {n: graph.take(n, each.view(1, 1, 1, 1)) for n, each in scales.items()}
        causal = {"use_causal_mask": True} if call.case.mask == "causal" else {}
        attn_scale = call.case.head_dim**-0.5
        results = graph.graph.sdpa_fp8_backward(**nodes, attn_scale=attn_scale, **causal)
        found = tuple(torch.empty_like(x[n], dtype=call.out_dtype) for n in "qkv")
        maxima = [torch.zeros(1, 1, 1, 1, device=one.device) for _ in results[len(found) :]]
        written = (*(each.transpose(1, 2) for each in found), *maxima)
        for node, tensor in zip(results, written, strict=True):
            graph.give(node, tensor)
        graph.compiled()()
        torch.cuda.synchronize()
        return found

    return run


def find_runners(device: torch.device) -> tuple[dict[str, Runner], dict[str, str], dict[str, str]]:
    """Who can run here, with their versions, and why the others cannot."""
    forward, versions, absent = fp8_accuracy.find_runners(device)
    runners: dict[str, Runner] = {"emulation": run_emulation, "attngen": run_kernels}
    if "cudnn" in forward:
        import cudnn  # type: ignore[import-not-found]

        runners["cudnn"] = cudnn_runner(cudnn)
    return {name: run for name, run in runners.items() if name in forward}, versions, absent


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
            figures = row.get("missing")
            if figures is None:
                figures = "  ".join(f"{n} {x:.3g} %" for n, x in row["to_stored"].items())
            names = f"{row['inputs']:9s} {row['mask']:7s} d{row['head_dim']:<4d} {row['gradients']}"
            print(f"{names:30s} {row['who']:10s} {figures}", flush=True)
    if options.output:
        named = {"versions": versions, "absent": absent, "rows": rows}
        write_report(options.output, SCHEMA, scale_s=fp8.DEFAULT_SCALE_S, **named)
    return 0


if __name__ == "__main__":
    sys.exit(main())
