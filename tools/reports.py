"""The JSON that the measuring tools write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from attngen.bench.machine import describe_machine
from attngen.io.values import to_data


@cache
def _machine() -> Any:
    return to_data(describe_machine())


def write_report(path: Path, schema: int, **fields: Any) -> None:
    """Fields of a run on this machine, today, UTC."""
    date = datetime.now(timezone.utc).date().isoformat()
    report = {"schema": schema, "date": date, "machine": _machine(), **fields}
    path.write_text(json.dumps(report, indent=1) + "\n")


def write_rows(
    path: Path | None, schema: int, rows: Iterable[dict[str, Any]], **fields: Any
) -> None:
    """Measure rows one after another, and write the report anew with each: a run that is ended
    before its last leaves those before it. path: None to measure alone."""
    found: list[dict[str, Any]] = []
    for row in rows:
        found.append(row)
        if path is not None:
            write_report(path, schema, **fields, rows=found)


def timing_of(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of a report that say how calls were timed, of such options."""
    return {name: getattr(options, name) for name in ("rounds", "settle_ms", "budget_ms")}


def timing_options(
    what: str, head_dims: Iterable[int], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Options of a tool that times calls of these head dims on a GPU: output, rounds, settle_ms,
    budget_ms, head_dims. what: the tool's docstring. Exits where there is no GPU."""
    import torch

    dims = list(head_dims)
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--settle-ms", type=float, default=100)
    parser.add_argument("--budget-ms", type=float, default=60)
    parser.add_argument("--head-dims", type=int, nargs="+", default=dims, choices=dims)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return options
