"""Sum up the reports of docs/results in six rows: attngen's speed over that of each peer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attngen.bench import decode_report, report
from attngen.bench.report import Mean
from attngen.errors import MeasureError

HEADER = ("| what, in bf16 | cases | to FlashAttention-3 | to cuDNN | to the fastest peer |",
          "|---|---:|---:|---:|---:|")  # fmt: skip
FORWARD = "forward-call.json"  # forward.json is of earlier kernels
BACKWARD = "backward.json"
PAGED = ("fa3", "cudnn-paged")


def markdown(folder: Path) -> Iterator[str]:
    """The table's lines, then who was measured. Raises: MeasureError, OSError."""
    forward, backward = (report.read(folder / name) for name in (FORWARD, BACKWARD))
    decode = decode_report.read(folder / "decode.json")
    day, variants = read_variants(folder / "variant-peers.json")
    yield from HEADER
    yield row("forward", forward.means)
    yield row("backward", backward.means)
    yield row("backward, the same bits on every run", repeatable(backward))
    yield row("one query a sequence, over pages", paged(decode))
    for direction, name in (("fwd", "forward"), ("bwd", "backward")):
        means = {"best": mean(x["ratio"] for x in variants if x["direction"] == direction)}
        yield row(f"{name} of windows, ALiBi, sinks, softcap, biases, dropout, masks", means)
    yield ""
    yield (
        "Speed of attngen over theirs, geometric means, against the fastest of those that have the "
        f"case; {forward.machine.chip}, each result checked, all of a report timed in one run: the "
        f"forward on {forward.date}, the backward on {backward.date}, pages on {decode.date}, the "
        f"others on {day}."
    )


def row(name: str, means: Mapping[str, Mean]) -> str:
    """One line; – where a peer was not timed."""
    best = means["best"]
    cells = [cell(means.get(peer)) for peer in ("fa3", "cudnn", "best")]
    return f"| {name} | {best.rows} | {' | '.join(cells)} |"


def cell(found: Mean | None) -> str:
    return "–" if found is None else f"{found.ratio:.2f}"


def repeatable(backward: report.Report) -> dict[str, Mean]:
    """Ratios of the deterministic modes of attngen and FlashAttention-3."""
    both = [x.tflops for x in backward.rows if {"attngen-det", "fa3-det"} <= x.tflops.keys()]
    found = mean(x["attngen-det"] / x["fa3-det"] for x in both)
    return {"fa3": found, "best": found}


def paged(decode: decode_report.Report) -> dict[str, Mean]:
    """Ratios to the peers that read pages, too."""
    fastest = mean(x.gbps["attngen"] / max(x.gbps[n] for n in PAGED if n in x.gbps)
                   for x in decode.rows)  # fmt: skip
    return {"fa3": decode.means["fa3"], "cudnn": decode.means["cudnn-paged"], "best": fastest}


def mean(ratios: Iterable[float | None]) -> Mean:
    """Geometric mean of the ratios that there are."""
    logs = [math.log(ratio) for ratio in ratios if ratio]
    return Mean(round(math.exp(sum(logs) / len(logs)), 3), len(logs))


def read_variants(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """Day of the run, and rows of variants that have a peer, without the plain call.

    Raises: MeasureError, OSError.
    """
    try:
        run = json.loads(path.read_text())
        return run["date"], [x for x in run["rows"] if x["variant"] != "plain" and x["ratio"]]
    except (ValueError, KeyError, TypeError) as error:
        raise MeasureError(f"{path} is no report of variants beside their peers") from error
