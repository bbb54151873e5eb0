"""The guide's tables of docs/results/mma-sync.json and mma-sync-compile.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attngen.errors import MeasureError

DIRECTIONS = {
    "fwd": ("forward", "FlashAttention-2", "tflops"),
    "bwd": ("backward", "FlashAttention-2", "tflops"),
    "decode": ("one query a sequence", "attngen wgmma", "gbps"),
    "latent": ("one query a sequence, latent attention", "attngen wgmma", "gbps"),
}
UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s"}
OURS = "attngen mma.sync"


def markdown(path: Path) -> Iterator[str]:
    """A table a direction. Raises: MeasureError where the file is none such."""
    try:
        report = json.loads(path.read_text())
        if any("seconds" in row for row in report["rows"]):
            yield _compiling(report)
            return
        rows, machine = report["rows"], report["machine"]
        found = [x for name in (*DIRECTIONS, "narrow") for x in _table(name, rows, report["means"])]
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureError(f"{path} is no report of tools/mma_sync_speed.py") from error
    yield from found
    yield (
        f"{machine['chip']}, kernels built for `sm_90`, {report['date']}, medians of "
        f"{report['rounds']} rounds in shuffled order; torch {machine['torch']}, driver "
        f"{machine['driver']}."
    )


def _table(name: str, rows: Sequence[dict[str, Any]], means: dict[str, float]) -> Iterator[str]:
    """The rows of a direction; none where it was not measured."""
    chosen = [row for row in rows if row["direction"] == name]
    if not chosen:
        return
    if name == "narrow":
        yield from _narrow(chosen)
        return
    title, peer, unit = DIRECTIONS[name]
    yield f"| {title} | {UNITS[unit]} | {peer} | ratio |"
    yield "|---|---:|---:|---:|"
    for row in chosen:
        peers = row[unit].get(peer, "–")
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.3f}"
        yield f"| {row['case']} | {row[unit][OURS]} | {peers} | {ratio} |"
    yield ""
    parts = [key.removeprefix(f"{name} ") for key in means if key.startswith(f"{name} ")]
    of_parts = "".join(f"; of {part} {means[f'{name} {part}']:.3f}" for part in parts)
    yield f"Geometric mean: {means[name]:.3f}{of_parts}."
    yield ""


def _narrow(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Prompts by how their operands are stored."""
    names = list(rows[0]["tflops"])
    yield f"| forward, TFLOP/s | {' | '.join(names)} |"
    yield f"|---|{'---:|' * len(names)}"
    for row in rows:
        yield f"| {row['case']} | {' | '.join(str(row['tflops'][x]) for x in names)} |"
    yield ""


def _compiling(report: dict[str, Any]) -> str:
    """A sentence a chip says how long its forwards take to compile."""
    by_chip: dict[str, list[float]] = {}
    for row in report["rows"]:
        by_chip.setdefault(row["arch"], []).append(row["seconds"])
    said = ", ".join(f"{min(each)} to {max(each)} on `{arch}`" for arch, each in by_chip.items())
    nvrtc = report["machine"]["nvrtc"]
    return f"A forward compiles in so many CPU seconds: {said} (NVRTC {nvrtc}, {report['date']})."
