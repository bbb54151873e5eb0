"""Run: every case checked, timed beside its peers, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TypeVar

import torch

from ..errors import MeasureError
from ..frontends.pytorch.descriptions import device_arch
from ..targets.target import names
from . import checking, timing
from .energy import NONE, Counter, counter, joules
from .machine import describe_machine
from .peers import Call, Maker, Operands, Peer, Through, describe, ours
from .report import DETERMINISTIC, OURS, SCHEMA, Report, Row, make_row, means_of
from .workloads import FLOPS, Case

Timed = TypeVar("Timed")
Made = TypeVar("Made")


def require_gpu() -> str:
    """The architecture of the current GPU. Raises: MeasureError where no kernel can be timed."""
    if not torch.cuda.is_available():
        raise MeasureError("timing needs a GPU, and PyTorch sees none; `attngen doctor` says more")
    arch = device_arch(torch.device("cuda"))
    if arch is None:
        available = ", ".join(names())
        raise MeasureError(f"{torch.cuda.get_device_name()} has no kernels; available: {available}")
    return arch


@dataclass(frozen=True)
class Manner:
    """How calls are timed. rounds: measurements of each; budget_ms: GPU time of one of them;
    deterministic: time deterministic modes, too; through: what attngen's backward is, as
    `peers.ours` says; energy: measure joules beside."""

    rounds: int
    budget_ms: float
    deterministic: bool = False
    through: Through = "operator"
    energy: bool = False


def run(
    direction: str,
    cases: Sequence[Case],
    peers: Mapping[str, Peer],
    absent: Mapping[str, str],
    manner: Manner,
    progress: Callable[[Report], None],
) -> Report:
    """Time attngen and the peers, case after case, on the current CUDA device.

    peers: one that has attngen's name stands for it, in another front end. absent: peers that were
    asked for and are not here, by name and reason. progress: is given the report so far as each row
    comes. An interrupt ends it behind the rows that there are. Raises: MeasureError where nothing
    can be timed here.
    """
    require_gpu()
    makers = participants(direction, peers, manner)
    read = counter() if manner.energy else None
    report = Report(
        schema=SCHEMA,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        direction=direction,
        dtype="bf16",
        machine=describe_machine(),
        rounds=manner.rounds,
        budget_ms=manner.budget_ms,
        ceiling=timing.CEILING,
        peers={name: peer.source for name, peer in peers.items()},
        absent=dict(absent),
        rows=(),
        means={},
        through=manner.through,
    )
    for row in each_timed(cases, lambda case: time_case(direction, case, makers, manner, read)):
        rows = (*report.rows, row)
        report = replace(report, rows=rows, means=means_of(rows))
        progress(report)
    return report


def each_timed(cases: Iterable[Timed], time_one: Callable[[Timed], Made]) -> Iterator[Made]:
    """The rows of the cases, one after another; where an interrupt (Ctrl-C) comes behind the first,
    those before it."""
    some = False
    for case in cases:
        try:
            row = time_one(case)
        except KeyboardInterrupt:
            if some:
                return
            raise
        some = True
        yield row


def participants(direction: str, peers: Mapping[str, Peer], manner: Manner) -> dict[str, Maker]:
    """Who is timed, attngen first: each peer's call in its ordinary mode, and in its deterministic
    one where that is wanted and there is one."""
    makers = {}
    for name, peer in {OURS: ours(manner.through), **peers}.items():
        makers[name] = peer.makers[direction]
        if manner.deterministic and peer.deterministic:
            makers[name + DETERMINISTIC] = peer.deterministic
    return makers


def time_case(
    direction: str,
    case: Case,
    makers: Mapping[str, Maker],
    manner: Manner,
    read: Counter | None = None,
) -> Row:
    """One row: whoever computes the case rightly is timed, with the ceiling among them. read: the
    counter of energy, where that is measured."""
    with torch.no_grad():
        calls, missing = checked_calls(direction, case, makers)
        all_calls = {**calls, timing.CEILING: timing.ceiling_call()}
        times = timing.time_interleaved(all_calls, manner.rounds, manner.budget_ms)
        energy = NONE if read is None else joules(calls, read)
    ceiling = timing.CEILING_FLOPS / times.pop(timing.CEILING) / 1e9
    return make_row(case.name, FLOPS[direction](case), times, ceiling, missing, energy)


def checked_calls(
    direction: str, case: Case, makers: Mapping[str, Maker]
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls whose result on random operands is right, and why the others have none."""
    operands = random_operands(case)
    expected = checking.EXPECT[direction](case, operands)
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            call = maker(case, operands)
            checking.check(call(), expected)
        except MeasureError as error:
            missing[name] = str(error)
        except Exception as error:  # a peer refuses a case in its own way
            missing[name] = describe(error)
        else:
            calls[name] = call
    return calls, missing


def random_operands(case: Case) -> Operands:
    """Standard normal q, k, v and d_o, the same in every run."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (
        (case.heads_q, case.head_dim),
        (case.heads_kv, case.head_dim),
        (case.heads_kv, case.head_dim_v),
        (case.heads_q, case.head_dim_v),
    )
    return Operands(
        *(
            torch.randn(
                *(case.batch, case.length, heads, dim),
                generator=generator,
                device="cuda",
                dtype=torch.bfloat16,
            )
            for heads, dim in sizes
        )
    )
