"""The guide's table of docs/results/callables.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from attngen.errors import MeasureError

MOST = 20  # times as fast: beyond it the other one is hardly meant to be used
DIRECTIONS = ("fwd", "bwd")
Rows = dict[tuple[str, str], dict[str, Any]]


def markdown(path: Path) -> Iterator[str]:
    """Forward and backward of a case a row. Raises: MeasureError where the file is none such."""
    try:
        report = json.loads(path.read_text())
        found = [row for row in report["rows"] if row["direction"] in DIRECTIONS]
        rows = {(row["case"], row["direction"]): row for row in found}
        lines = [_line(rows, case) for case in dict.fromkeys(case for case, _ in rows)]
        below = [*_means(found), *_masks(report["rows"]), *_host(report["rows"])]
        machine, case, rounds = report["machine"], report["case"], report["rounds"]
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureError(f"{path} is no report of tools/callables_speed.py") from error
    yield "| function | attngen | mask kept | Flex | to Flex | argument | to argument |"
    yield f"|---|{'---:|' * 6}"
    yield from lines
    yield ""
    yield (
        f"Milliseconds, forward / backward, {case}, every pair but what masks hide; mask kept: the "
        "forward with a mask that an `attngen.Schedule` holds; argument: attngen's own for the "
        f"same, of documents packed tokens. {machine['chip']}, {report['date']}, medians of "
        f"{rounds} rounds in shuffled order; torch {machine['torch']}, driver {machine['driver']}. "
        "–: there is none."
    )
    yield from below


def _line(rows: Rows, case: str) -> str:
    pair = [rows.get((case, direction), {"ms": {}}) for direction in DIRECTIONS]
    ms = [_pair([row["ms"].get(who) for row in pair]) for who in ("attngen", "kept", "flex")]
    argument = _pair([row["ms"].get("built_in") for row in pair])
    flex, own = (_pair([row.get(f"to_{who}") for row in pair]) for who in ("flex", "built_in"))
    return f"| {' | '.join([case.replace('_', ' '), *ms, flex, argument, own])} |"


def _pair(values: list[float | None]) -> str:
    """Values as a cell of the table; those that are missing at the end are left out."""
    if not any(values):
        return "–"
    while values[-1] is None:
        values = values[:-1]
    return " / ".join("–" if x is None else f"{x:.3g}" if x >= 1 else f"{x:.2f}" for x in values)


def _means(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How the rows compare as a whole, but for those where one of the two takes seconds."""
    ratios = [row["to_flex"] for row in rows if row.get("to_flex", MOST) < MOST]
    if ratios:
        mean = prod(ratios) ** (1 / len(ratios))
        yield (
            f"Geometric mean of {len(ratios)} ratios to Flex below {MOST}: {mean:.2f}; the least "
            f"{min(ratios):.2f}."
        )


def _masks(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Sentences on the time that masks take to be made, by their lengths."""
    made = [row for row in rows if row["direction"] == "mask" and row["ms"]]
    for length in sorted({row["length"] for row in made}):
        each = (
            f"{row['case'].replace('_', ' ')} {row['ms']['attngen']:.2g}"
            for row in made
            if row["length"] == length
        )
        yield f"Masks of {length} x {length} pairs, milliseconds: {', '.join(each)}."


def _host(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Sentences on calls' time of the host."""
    host = [f"{row['case']} {row['us']:.3g}" for row in rows if row["direction"] == "host"]
    if host:
        yield f"Microseconds of the host a small call, warm: {', '.join(host)}."
    first = [f"{row['case']} {row['ms']:.0f}" for row in rows if row["direction"] == "first call"]
    if first:
        text = "Milliseconds of a first call of a new program, compilation included"
        yield f"{text}: {', '.join(first)}."
