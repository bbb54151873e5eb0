"""The guide's table of docs/results/doors.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attngen.errors import MeasureError

TITLES = {
    "attngen": "attngen",
    "flash": "sdpa flash",
    "cudnn": "sdpa cuDNN",
    "efficient": "sdpa efficient",
    "flex": "flex",
    "eager": "eager",
}


def markdown(path: Path) -> Iterator[str]:
    """A step of a stack a row. Raises: MeasureError where the file is none such."""
    try:
        report = json.loads(path.read_text())
        rows = report["rows"]
        asked = {who for row in rows for who in (*row["ms"], *row["missing"])}
        machine, library = report["machine"], report["versions"]["transformers"]
        lines = [_line(row, [who for who in TITLES if who in asked]) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureError(f"{path} is no report of tools/doors_speed.py") from error
    columns = ["stack", "step", "tokens", *(TITLES[who] for who in TITLES if who in asked)]
    yield f"| {' | '.join([*columns, 'to best peer'])} |"
    yield f"|---|---|{'---:|' * (len(columns) - 1)}"
    yield from lines
    yield ""
    yield (
        f"Milliseconds of {report['layers']} layers, bf16, {machine['chip']}, {report['date']}, "
        f"medians of {report['rounds']} rounds in shuffled order; decode: one token of "
        f"{report['sequences']} sequences in a CUDA graph; torch {machine['torch']}, transformers "
        f"{library}, driver {machine['driver']}. –: it does not compute the step, or was not asked."
    )


def _line(row: dict[str, Any], names: list[str]) -> str:
    ms = [f"{row['ms'][who]:.3g}" if who in row["ms"] else "–" for who in names]
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"| {' | '.join([row['stack'], row['step'], str(row['length']), *ms, ratio])} |"
