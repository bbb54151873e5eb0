"""Tune: times the candidate plans of a problem on the GPU, interleaved, each checked before."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain

import torch
from torch import Tensor

from ..call.table import SCALES
from ..compiler import digest
from ..compiler.builder import Built, build_plan
from ..errors import CompileError, MeasureError
from ..frontends.pytorch.operation import tile_counter
from ..kernels.base import TiledPlan
from ..kernels.plan import feasible
from ..kernels.tuned import Candidate, Entry, settings
from ..runtime import load
from ..runtime.launch import launch, prepare
from ..runtime.run_time import UNBOUNDED, Extent, Scalars
from ..spec.problem import Problem
from .machine import describe_machine
from .run import require_gpu
from .timing import Call, time_interleaved

# Of scales that are not given.
SCALE_STRIDES = {f"descale_{x}_stride_{axis}": 0 for x in "qkv" for axis in ("batch", "head")}
TOKENS = 16384  # of a call, spread over as many sequences as the length allows
HIDDEN = 2048  # heads times head dim
DTYPES = {
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
    **{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2},
}
# Two right results differ by the rounding of weights and outputs, some 2^-9 of a row's root mean
# square each, and 2^-5 in 8 bits; a wrong one by as much as the row's largest output.
DIFFERENCE = 2**-6  # of a row's largest output
DIFFERENCE_8BIT = 2**-2


@dataclass(frozen=True)
class Effort:
    """How much is measured: sequence lengths, keys of a window, how many of the candidates in
    their order (None: all), rounds, and milliseconds of each measurement."""

    lengths: Sequence[int]
    window: int
    limit: int | None
    rounds: int
    budget_ms: float


@dataclass(frozen=True)
class Tuning:
    """An entry, whose first candidate is the one that the heuristics prefer, and why the compiler
    refused others, a line each."""

    entry: Entry
    refused: tuple[str, ...]

    def text(self, shown: int) -> Iterator[str]:
        """The fastest candidates, a line each, and the one of the heuristics wherever it came."""
        entry = self.entry
        ranked = entry.ranked()
        lines = differences([candidate for _, candidate in ranked])
        yield f"{entry.problem.label}: {len(ranked)} plans timed, {len(self.refused)} refused"
        yield "   cost" + "".join(f"{length:>9}" for length in entry.lengths) + "  ms at length"
        for place, (cost, candidate) in enumerate(ranked):
            heuristic = candidate == entry.candidates[0]
            if place < shown or heuristic:
                times = "".join(f"{candidate.milliseconds(n):9.4f}" for n in entry.lengths)
                mark = "  (heuristics)" if heuristic else ""
                yield f"  {cost:5.3f}{times}  {lines[place]}{mark}"


def differences(candidates: Sequence[Candidate]) -> list[str]:
    """For each candidate, on one line, the settings in which any differ."""
    tables = []
    for candidate in candidates:
        items = candidate.settings.items()
        nested = [
            each.items() if isinstance(each, dict) else [(name, each)] for name, each in items
        ]
        tables.append(dict(chain.from_iterable(nested)))
    names = [name for name in tables[0] if len({str(table[name]) for table in tables}) > 1]
    return [" ".join(f"{name}={table[name]}" for name in names) for table in tables]


def current_device() -> tuple[str, str]:
    """Architecture and name of the current GPU. Raises: MeasureError where it has no kernels."""
    return require_gpu(), torch.cuda.get_device_name()


def serves(problem: Problem) -> bool:
    """Whether `tune` knows what to launch the problem's kernels with: dense forwards that read no
    tensor beside Q, K, V and the scales of 8 bits."""
    return (
        (problem.direction, problem.scores, problem.softmax) == ("fwd", (), "vanilla")
        and not (problem.varlen or problem.decode)
        and not (problem.max_logit or problem.dropout or problem.attn_mask)
    )


def tune(problem: Problem, arch: str, effort: Effort) -> Tuning:
    """Times the problem's candidate plans on the current CUDA device.

    Every output is compared, element by element, with that of the plan that the heuristics
    prefer. Raises: MeasureError where that one does not build, another's output differs, or `tune`
    does not serve the problem.
    """
    if not serves(problem):
        raise MeasureError(f"{problem.label}: only plain dense forwards are tuned")
    plans = feasible(problem, arch)[: effort.limit]
    built, refused = _build(problem, plans, arch)
    times: list[dict[str, float]] = [{} for _ in built]
    for length in effort.lengths:
        calls = _checked_calls(problem, built, length, effort.window)
        medians = time_interleaved(calls, effort.rounds, effort.budget_ms)
        for number, ms in enumerate(times):
            ms[str(length)] = round(medians[str(number)], 5)
    candidates = tuple(
        Candidate(settings(each.plan), ms) for each, ms in zip(built, times, strict=True)
    )
    entry = Entry(
        problem=problem,
        arch=arch,
        lengths=tuple(effort.lengths),
        window=effort.window if "window" in problem.masks else 0,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        driver=describe_machine().driver,
        sources=digest.source_digests(),
        candidates=candidates,
    )
    return Tuning(entry, refused)


def shape_of(problem: Problem, length: int) -> tuple[int, int]:
    """Batch and heads of the call that is timed at this length."""
    return max(1, TOKENS // length), max(1, HIDDEN // problem.head_dim_qk)


def _build(
    problem: Problem, plans: Sequence[TiledPlan], arch: str
) -> tuple[list[Built], tuple[str, ...]]:
    """The kernels of the plans, the preferred first, and why the compiler refused the others."""

    def build(plan: TiledPlan) -> Built | CompileError:
        try:
            return build_plan(problem, plan, arch)
        except CompileError as error:
            return error

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        outcomes = list(pool.map(build, plans))
    if isinstance(outcomes[0], CompileError):
        raise MeasureError(f"{problem.label}: the preferred plan: {outcomes[0]}")
    refused = tuple(
        f"{plan.tile.m} x {plan.tile.n}: {outcome.reasons[0]}"
        for plan, outcome in zip(plans, outcomes, strict=True)
        if isinstance(outcome, CompileError)
    )
    return [each for each in outcomes if isinstance(each, Built)], refused


def _checked_calls(
    problem: Problem, built: Sequence[Built], length: int, window: int
) -> dict[str, Call]:
    """The kernels on the same random operands, by their number in `built`."""
    batch, heads = shape_of(problem, length)
    dims = (problem.head_dim_qk, problem.head_dim_qk, problem.head_dim_v)
    generator = torch.Generator("cuda").manual_seed(0)
    dtypes = (problem.dtype_q, problem.dtype_kv, problem.dtype_kv)
    tensors = {
        name: torch.randn(batch, length, heads, dim, generator=generator, device="cuda").to(
            DTYPES[dtype]
        )
        for name, dim, dtype in zip("qkv", dims, dtypes, strict=True)
    }
    shape = (batch, length, heads, problem.head_dim_v)
    tensors["o"] = torch.empty(shape, device="cuda", dtype=DTYPES[problem.dtype_o])
    tensors["lse"] = torch.empty((batch, heads, length), device="cuda", dtype=torch.float32)
    scalars = scalars_of(problem, window)
    calls: dict[str, Call] = {}
    difference = DIFFERENCE_8BIT if problem.eight_bit else DIFFERENCE
    wanted: Tensor | None = None
    for number, each in enumerate(built):
        call = calls[str(number)] = _call(each, tensors, scalars)
        tensors["o"].fill_(float("nan"))
        call()
        if wanted is None:
            wanted = tensors["o"].clone()
        if not agree(tensors["o"], wanted, difference):
            raise MeasureError(
                f"{problem.label}, {length} tokens: the plan {settings(each.plan)} computes NaN, "
                "or something else than the preferred one"
            )
    return calls


def agree(found: Tensor, wanted: Tensor, difference: float = DIFFERENCE) -> bool:
    """Whether two outputs [b, s, h, d] are equal but for rounding; NaN never is."""
    found, wanted = found.float(), wanted.float()
    limits = difference * wanted.abs().amax(dim=-1, keepdim=True)
    return bool(((found - wanted).abs() <= limits).all())


def scalars_of(problem: Problem, window: int) -> Scalars:
    """Numbers that a launch is told beside shapes; window: keys before the diagonal."""
    left = window if "window" in problem.masks else UNBOUNDED
    right = UNBOUNDED if "causal" in problem.masks else left
    return Scalars(problem.head_dim_qk**-0.5, left, right, numbers=SCALE_STRIDES)


def _call(built: Built, tensors: dict[str, Tensor], scalars: Scalars) -> Call:
    device = torch.cuda.current_device()
    stream = torch.cuda.current_stream().cuda_stream
    loaded = load.load(built.binary, built.cubin, device)
    extents = {
        name: Extent(*tensors[name].shape, *tensors[name].stride()[:3])  # b, s, h, d; b, s, h
        for name in ("q", "k", "v", "o")
    }
    prepared = prepare(loaded, extents, scalars)
    others = dict.fromkeys((*SCALES, "amax_s", "amax_o"), 0)  # of 8-bit kernels, none given
    if loaded.kernel.workspace:
        others["tile_counter"] = tile_counter(device, stream)

    def call() -> None:
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        launch(prepared, {**addresses, **others}, stream)

    return call
