"""Times the FP8 backward beside cuDNN's and the 16-bit one, as JSON.

    python tools/fp8_backward_speed.py -o docs/results/fp8-backward.json

Operands of standard normal numbers, in e4m3 with one scale a tensor, gradients of the output in
e5m2; interleaved rounds, medians, each at the clocks that its own power allows. cuDNN through
cudnn-frontend, where that is installed. docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
import attngen.frontends.pytorch.fp8_backward  # noqa: E402  # registers the operation
from attngen.bench.peers import describe  # noqa: E402
from attngen.bench.timing import Call, time_interleaved  # noqa: E402
from attngen.call.numbers import Arguments  # noqa: E402
from attngen.call.table import OPTIONAL  # noqa: E402
from tools.cudnn_graph import CudnnGraph, find_cudnn  # noqa: E402
from tools.reports import timing_of, timing_options, write_rows  # noqa: E402

SCHEMA = 1
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
SHAPES = [(1, 16384), (4, 4096)]  # batch, tokens
HEADS = {128: 16, 64: 32}  # by head dim
TOLERANCE = 0.2  # of each gradient, root mean squares: both computed the same
SCALE_DP = 64.0  # with which dS is stored: its largest element is below 1 here
SCALE_S = 256.0  # with which weights are stored: attngen's own choice for e4m3
DROPOUT = 0.1


@dataclass(frozen=True)
class Case:
    """Batch, tokens and head dim of a call with a mask."""

    batch: int
    tokens: int
    head_dim: int
    mask: str

    @property
    def name(self) -> str:
        heads = HEADS[self.head_dim]
        return f"b{self.batch}-s{self.tokens}-h{heads}-d{self.head_dim}-{self.mask}"

    @property
    def flops(self) -> int:
        """The five products, half of them under a causal mask."""
        full = 10 * self.batch * HEADS[self.head_dim] * self.tokens**2 * self.head_dim
        return full // (2 if self.mask == "causal" else 1)


@dataclass(frozen=True, eq=False)
class Operands:
    """A backward's: in 16 bits; stored in 8 with scales of 1; the forward's results."""

    wide: dict[str, Tensor]
    stored: dict[str, Tensor]
    out: Tensor
    lse: Tensor


def operands_of(case: Case) -> Operands:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (case.batch, case.tokens, HEADS[case.head_dim], case.head_dim)
    names = ("q", "k", "v", "d_o")
    wide = {n: torch.randn(shape, generator=generator, device="cuda").to(BF16) for n in names}
    stored = {n: x.to(E5M2 if n == "d_o" else E4M3) for n, x in wide.items()}
    q, k, v = (wide[n] for n in "qkv")
    out, aux = attngen.attention(q, k, v, mask=case.mask, return_lse=True, backend="cuda")
    assert aux.lse is not None
    return Operands(wide, stored, out, aux.lse)


def ours(
    case: Case,
    given: Operands,
    deterministic: bool,
    dtype: str,
    dropout: float = 0.0,
    layout: str = "bshd",
    lengths: Mapping[str, Tensor] = MappingProxyType({}),
) -> Callable[[], tuple[Tensor, ...]]:
    """attngen's backward in 8 bits, gradients of that dtype. lengths: operands that say them."""
    arguments = Arguments(
        mask=case.mask, out_dtype=dtype, amax=dtype != "bfloat16", deterministic=deterministic,
        dropout_p=dropout, layout=layout,
    )  # fmt: skip
    unit, scale, descale = (torch.tensor([x], device="cuda") for x in (1.0, SCALE_DP, 1 / SCALE_DP))
    stored = (given.stored[n] for n in "qkv")
    beside = dict.fromkeys(OPTIONAL) | dict.fromkeys(("descale_q", "descale_k", "descale_v"), unit)
    beside |= {"rng_state": torch.tensor((0, 0), device="cuda"), **lengths}
    of_gradients = [unit] * 3 if dtype.startswith("float8") else [None] * 3
    scales = (None, unit, scale, descale, *of_gradients)
    return partial(
        torch.ops.attngen.fp8_backward,
        *(given.stored["d_o"], None, *stored, given.out, given.lse),
        *(*beside.values(), *arguments, *scales),
    )


def packed(case: Case, given: Operands, dtype: str) -> Call:
    """attngen's backward in 8 bits of the same rows as packed tokens, gradients of that dtype."""
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.tokens
    rows = {name: x.flatten(0, 1) for name, x in given.stored.items()}
    lse = given.lse.transpose(0, 1).flatten(1).contiguous()
    tokens = Operands({}, rows, given.out.flatten(0, 1), lse)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    call = ours(case, tokens, False, dtype, layout="thd", lengths=lengths)
    shape = given.out.shape

    def run() -> list[Tensor]:
        dq, dk, dv, *_ = call()
        return [x.view(shape) for x in (dq, dk, dv)]

    return run


def in_16_bits(case: Case, given: Operands, deterministic: bool, dropout: float = 0.0) -> Call:
    """attngen's backward of the same call in bfloat16."""
    operands = (given.wide[n] for n in "qkv")
    arguments = Arguments(mask=case.mask, deterministic=deterministic, dropout_p=dropout)
    beside: dict[str, Tensor | None] = dict.fromkeys(OPTIONAL)
    beside["rng_state"] = torch.tensor((0, 0), device="cuda")
    return partial(
        torch.ops.attngen.backward,
        *(given.wide["d_o"], None, *operands, given.out, given.lse),
        *(*beside.values(), *arguments),
    )


def cudnn_backward(cudnn: Any, case: Case, given: Operands) -> Callable[[], Sequence[Tensor]]:
    """cuDNN's FP8 backward, gradients in e5m2. Raises: RuntimeError where it has no such graph."""
    graph = CudnnGraph(cudnn, cudnn.create_handle(), E4M3)
    one = torch.ones(1, 1, 1, 1, device="cuda")
    units = ("q", "k", "v", "o", "dO")
    scales = {f"descale_{n}": one for n in units} | {f"scale_{n}": one for n in ("dQ", "dK", "dV")}
    scales |= {"scale_s": one * SCALE_S, "descale_s": one / SCALE_S}
    scales |= {"scale_dP": one * SCALE_DP, "descale_dP": one / SCALE_DP}
    stored = {**given.stored, "o": given.out.to(E4M3)}
    stored["dO"] = stored.pop("d_o")
    nodes = {n: graph.take(n, x.transpose(1, 2)) for n, x in stored.items()}
    nodes |= {n: graph.take(n, x) for n, x in scales.items()}
    nodes["stats"] = graph.take("stats", given.lse.view(*given.lse.shape, 1))
    causal = {"use_causal_mask": True} if case.mask == "causal" else {}
    results = graph.graph.sdpa_fp8_backward(**nodes, attn_scale=case.head_dim**-0.5, **causal)
    gradients = [torch.empty_like(given.wide[n], dtype=E5M2) for n in "qkv"]
    maxima = [torch.zeros(1, 1, 1, 1, device="cuda") for _ in results[3:]]
    left = [*(x.transpose(1, 2) for x in gradients), *maxima]
    for node, tensor in zip(results, left, strict=True):
        graph.give(node, tensor)
    launch = graph.compiled()

    def execute() -> Sequence[Tensor]:
        launch()
        return gradients

    return execute


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest of the gradients' relative differences, root mean squares."""
    pairs = [(x.float(), y.float()) for x, y in zip(found, wanted, strict=True)]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt()) for x, y in pairs)


def calls_of(case: Case, cudnn: Any) -> tuple[dict[str, Call], dict[str, str], dict[str, float]]:
    """Who is timed, why others are not, and how far each is from the 16-bit gradients."""
    given = operands_of(case)
    calls: dict[str, Call] = {
        "attngen": ours(case, given, False, "float8_e5m2"),
        "attngen to bf16": ours(case, given, False, "bfloat16"),
        "attngen-det": ours(case, given, True, "float8_e5m2"),
        "attngen packed": packed(case, given, "float8_e5m2"),
        "attngen bf16": in_16_bits(case, given, False),
        "attngen dropout": ours(case, given, False, "float8_e5m2", DROPOUT),
        "attngen bf16 dropout": in_16_bits(case, given, False, DROPOUT),
    }
    missing: dict[str, str] = {}
    if cudnn is not None:
        try:
            calls["cudnn"] = cudnn_backward(cudnn, case, given)
        except RuntimeError as error:
            missing["cudnn"] = describe(error)
    results: dict[str, Any] = {name: call() for name, call in calls.items()}
    wide = {drops: results[f"attngen bf16{drops}"][:3] for drops in ("", " dropout")}
    errors = {
        name: round(difference(x[:3], wide[" dropout" * name.endswith("dropout")]), 4)
        for name, x in results.items()
    }
    for name in [name for name, error in errors.items() if not error <= TOLERANCE]:
        missing[name] = f"its gradients differ by {errors[name]:.2g}"
        del calls[name]
    return calls, missing, errors


def measure(options: argparse.Namespace, cudnn: Any) -> Iterator[dict[str, Any]]:
    """A row a case."""
    for case in (
        Case(batch, tokens, d, mask)
        for d in options.head_dims
        for batch, tokens in SHAPES
        for mask in ("none", "causal")
    ):
        calls, missing, errors = calls_of(case, cudnn)
        ms = time_interleaved(calls, options.rounds, options.budget_ms, settle_ms=options.settle_ms)
        row: dict[str, Any] = {
            "case": case.name,
            "ms": {name: round(x, 4) for name, x in ms.items()},
            "tflops": {name: round(case.flops / x / 1e9, 1) for name, x in ms.items()},
            "differences": errors,
            "missing": missing,
        }
        if "attngen" in ms:
            named = (("cudnn", "to_cudnn"), ("attngen bf16", "to_bf16"))
            row |= {x: round(ms[n] / ms["attngen"], 3) for n, x in named if n in ms}
        if {"attngen", "attngen-det"} <= ms.keys():
            row["deterministic"] = round(ms["attngen"] / ms["attngen-det"], 3)
        if {"attngen", "attngen packed"} <= ms.keys():
            row["packed"] = round(ms["attngen"] / ms["attngen packed"], 3)
        if "attngen dropout" in ms:
            row["dropout_to_bf16"] = round(ms["attngen bf16 dropout"] / ms["attngen dropout"], 3)
        figures = "  ".join(f"{name} {x:.0f}" for name, x in row["tflops"].items())
        ratios = f"x cudnn {row.get('to_cudnn', '-')}  x bf16 {row.get('to_bf16', '-')}"
        print(f"{case.name:26s} {figures}  {ratios}  {errors} {missing}", flush=True)
        yield row


def main(arguments: list[str] | None = None) -> int:
    options = timing_options(__doc__ or "", HEADS, arguments)
    versions: dict[str, str] = {"attngen": attngen.__version__}
    absent: dict[str, str] = {}
    cudnn = find_cudnn(lambda cudnn: cudnn, versions, absent)
    rows = measure(options, cudnn)
    write_rows(
        options.output,
        SCHEMA,
        rows,
        versions=versions,
        absent=absent,
        **timing_of(options),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
