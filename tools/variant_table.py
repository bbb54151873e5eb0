"""The README's table of docs/results/variant-peers.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attngen.errors import MeasureError

TITLES = {"attngen": "attngen", "cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4", "flex": "Flex"}
DIRECTIONS = ("fwd", "bwd")


def markdown(path: Path) -> Iterator[str]:
    """Forward and backward of a variant a row. Raises: MeasureError where the file is none such."""
    try:
        report = json.loads(path.read_text())
        rows = {(row["variant"], row["direction"]): row for row in report["rows"]}
        peers = report["peers"]
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureError(f"{path} is no report of tools/variant_peers.py") from error
    names = ["attngen", *peers]
    columns = ["variant", *(TITLES[name] for name in names), "to best peer"]
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    for variant in dict.fromkeys(variant for variant, _ in rows):
        pair = [rows[variant, direction] for direction in DIRECTIONS]
        cells = [_both(row["tflops"].get(name) for row in pair) for name in names]
        ratios = [None if row["ratio"] is None else format(row["ratio"], ".2f") for row in pair]
        yield f"| {' | '.join([variant, *cells, _pair(ratios)])} |"
    machine = report["machine"]
    yield ""
    yield (
        f"TFLOP/s, forward / backward, {report['case']}, causal FLOPs also where a window leaves "
        f"fewer; {machine['chip']}, {report['date']}, medians of {report['rounds']} rounds in "
        f"shuffled order; torch {machine['torch']}, driver {machine['driver']}. –: the peer has no "
        "such variant, or this build of it has none."
    )
    yield "; ".join(f"{TITLES[name]}: {source}" for name, source in peers.items()) + "."


def _both(speeds: Iterator[float | None]) -> str:
    return _pair([None if speed is None else format(speed, ".0f") for speed in speeds])


def _pair(texts: list[Any]) -> str:
    return " / ".join(text or "–" for text in texts) if any(texts) else "–"
