"""Report: what the times say, as a value with a JSON form, as text and as a Markdown table.

Needs no torch: a table can be rendered anywhere.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from ..errors import MeasureError
from ..io.files import read_regular, replacing
from ..io.values import from_json, to_json

SCHEMA = 1
BYTE_LIMIT = 16 << 20  # of a report; one of all cases has 50 kB
Kind = TypeVar("Kind")
OURS = "attngen"
DETERMINISTIC = "-det"  # ends the name of whoever is timed in its deterministic mode, too
CASE_WIDTH = 28  # of a text column
# In the order of columns and bars.
TITLES = {
    OURS: "attngen",
    OURS + DETERMINISTIC: "attngen det.",
    "fa3": "FA3",
    "fa3" + DETERMINISTIC: "FA3 det.",
    "fa4": "FA4",
    "fa4" + DETERMINISTIC: "FA4 det.",
    "cudnn": "cuDNN",
    "sdpa": "SDPA",
    "efficient": "SDPA efficient",
    "flex": "Flex",
    "xla": "XLA",
    "tokamax": "tokamax",
}


@dataclass(frozen=True)
class Row:
    """One case. `ms`: median time of each, `tflops` the same as a rate; `ceiling_tflops`: the
    matrix product measured between them, `share` attngen's part of it; `ratio`: attngen's rate
    over that of `best_peer`, both in their ordinary mode; `missing`: who has no figure here, and
    why; `deterministic`: attngen's rate in its deterministic mode over its ordinary one; `joules`:
    what each call took, of a run that measured energy."""

    case: str
    flops: int
    ms: dict[str, float]
    tflops: dict[str, float]
    ceiling_tflops: float
    share: float | None
    best_peer: str | None
    ratio: float | None
    missing: dict[str, str]
    deterministic: float | None = None
    joules: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mean:
    """Geometric mean of attngen's rate over a peer's, and the number of rows that have both."""

    ratio: float
    rows: int


@dataclass(frozen=True)
class Machine:
    """The machine and versions of a run; None for what is absent.

    sources: digests of the files that make kernels.
    """

    chip: str | None
    driver: str | None
    torch: str | None
    cuda: str | None
    nvrtc: str | None
    python: str
    sources: dict[str, str]


@dataclass(frozen=True)
class Report:
    """One run. `peers`: who was timed, with package and version; `absent`: who could not be, and
    why; `means`: by peer and mode, `best` for the best peer of each row; `through`: what attngen's
    backward was, `operator` or `call` (`peers.ours`)."""

    schema: int
    date: str
    direction: str
    dtype: str
    machine: Machine
    rounds: int
    budget_ms: float
    ceiling: str
    peers: dict[str, str]
    absent: dict[str, str]
    rows: tuple[Row, ...]
    means: dict[str, Mean]
    through: str = "operator"


def timed(report: Report) -> list[str]:
    """The implementations with a figure in any row, in the order of TITLES."""
    return [name for name in TITLES if any(name in row.ms for row in report.rows)]


def make_row(
    case: str,
    flops: int,
    ms: Mapping[str, float],
    ceiling_tflops: float,
    missing: Mapping[str, str],
    joules: Mapping[str, float] = MappingProxyType({}),
) -> Row:
    """The row of these median times. joules: of a call, where energy was measured."""
    rates = {name: flops / each / 1e9 for name, each in ms.items()}
    best = max(_rivals(rates), key=lambda name: rates[name], default=None)
    own, ordered = rates.get(OURS), rates.get(OURS + DETERMINISTIC)
    return Row(
        case=case,
        flops=flops,
        ms={name: round(each, 5) for name, each in ms.items()},
        tflops={name: round(each, 1) for name, each in rates.items()},
        ceiling_tflops=round(ceiling_tflops, 1),
        share=None if own is None else round(own / ceiling_tflops, 3),
        best_peer=best,
        ratio=None if own is None or best is None else round(own / rates[best], 3),
        missing=dict(missing),
        deterministic=None if own is None or ordered is None else round(ordered / own, 3),
        joules={name: float(f"{each:.4g}") for name, each in joules.items()},
    )


def _rivals(names: Iterable[str]) -> list[str]:
    """The peers in their ordinary mode."""
    return [name for name in names if name != OURS and not name.endswith(DETERMINISTIC)]


def means_of(rows: Sequence[Row]) -> dict[str, Mean]:
    """For each peer and mode of the rows, and for `best`, the mean of attngen's rate over its
    rate."""
    return geometric_means(row.ms for row in rows)


def geometric_means(rows: Iterable[Mapping[str, float]]) -> dict[str, Mean]:
    """Geometric means over rows of attngen's rate over each other's. rows: times by name."""
    ratios: dict[str, list[float]] = {}
    for times in rows:
        if OURS not in times:
            continue
        against = {name: each / times[OURS] for name, each in times.items() if name != OURS}
        if rivals := _rivals(against):
            against["best"] = min(against[name] for name in rivals)
        for name, ratio in against.items():
            ratios.setdefault(name, []).append(ratio)
    return {
        name: Mean(round(math.exp(math.fsum(map(math.log, each)) / len(each)), 3), len(each))
        for name, each in ratios.items()
    }


def save(report: Report, path: Path) -> None:
    """Write the report's JSON form. Raises: OSError, also over a file that is no report."""
    write(to_json(report, indent=1), path)


def write(text: str, path: Path) -> None:
    """Write a report of any kind. Raises: OSError, also over a file that is none."""
    with replacing(path, is_report, "report") as file:
        file.write(text.encode() + b"\n")


def is_report(path: Path) -> bool:
    """Whether a file is a report of any kind and version."""
    try:
        data = json.loads(read_regular(path, BYTE_LIMIT))
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(data, dict) and {"schema", "machine"} <= data.keys()


def read(path: Path) -> Report:
    """Read what `save` wrote. Raises: MeasureError where the file is no such report."""
    return read_as(Report, path, "attngen bench", SCHEMA)


def read_as(kind: type[Kind], path: Path, command: str, schema: int) -> Kind:
    """A report of this kind and schema, which a command wrote. Raises: MeasureError."""
    try:
        report = from_json(kind, read_regular(path, BYTE_LIMIT).decode())
    except ValueError as error:
        raise MeasureError(f"{path} is no report of `{command}`: {error}") from error
    found: int = report.schema  # type: ignore[attr-defined]  # every report has one
    if found != schema:
        raise MeasureError(f"{path}: schema {found}; this version reads {schema}")
    return report


def text_header(names: Sequence[str]) -> str:
    """The line above those of `text_row`; names: attngen and its peers, in order."""
    figures = "".join(f"{name:>{_width(name)}}" for name in names)
    return f"{'TFLOP/s':<{CASE_WIDTH}}{figures}{'ceiling':>9}{'share':>7}{'vs best':>9}"


def text_row(row: Row, names: Sequence[str]) -> str:
    """A case's figures as one line, then a line for each that has none."""
    figures = "".join(f"{_number(row.tflops.get(name), '.1f'):>{_width(name)}}" for name in names)
    line = (
        f"{row.case:<{CASE_WIDTH}}{figures}{row.ceiling_tflops:>9.1f}"
        f"{_number(row.share, '.0%'):>7}{_number(row.ratio, '.3f'):>9}"
    )
    energy = [f"{name} {row.flops / each / 1e12:.3g}" for name, each in row.joules.items()]
    lines = [line, *(f"  {name}: {why}" for name, why in row.missing.items())]
    return "\n".join([*lines, *(["  TFLOP/J: " + ", ".join(energy)] if energy else [])])


def _width(name: str) -> int:
    return max(7, len(name) + 1)


def text_summary(report: Report) -> Iterator[str]:
    """The means, a line each, and who was absent."""
    for name, mean in report.means.items():
        whom = "the best peer of each row" if name == "best" else name
        yield f"{mean.ratio:.3f} x {whom}, geometric mean of {mean.rows} rows"
    for name, why in report.absent.items():
        yield f"absent: {name}: {why}"


def markdown(report: Report) -> Iterator[str]:
    """The table of a README: figures, the best of a row in bold, then the means and what ran."""
    names = timed(report)
    columns = ["case", *(TITLES[name] for name in names), "of ceiling", "to best peer"]
    ordered = OURS + DETERMINISTIC in names
    columns += ["det. to ordinary"] if ordered else []
    metered = any(row.joules for row in report.rows)
    columns += ["TFLOP/J", "to the best peer's"] if metered else []
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    for row in report.rows:
        ordinary = [rate for name, rate in row.tflops.items() if not name.endswith(DETERMINISTIC)]
        best = max(ordinary, default=0.0)
        figures = [_emphasised(row.tflops.get(name), best) for name in names]
        cells = [f"`{row.case}`", *figures, _number(row.share, ".0%"), _number(row.ratio, ".2f")]
        cells += [_number(row.deterministic, ".2f")] if ordered else []
        cells += _energy(row) if metered else []
        yield f"| {' | '.join(cells)} |"
    if report.means:
        means = [report.means.get(name) for name in names if name != OURS]
        cells = ["attngen to it, geometric mean", "", *(_mean(each) for each in means)]
        cells += ["", _mean(report.means.get("best"))]
        if ordered:
            mean = report.means.get(OURS + DETERMINISTIC)
            cells.append("–" if mean is None else f"{1 / mean.ratio:.3f}")
        cells += ["", ""] if metered else []
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _caption(report)


def _energy(row: Row) -> list[str]:
    """attngen's operations a joule, and its rate over the best of its peers' in their ordinary
    mode."""
    ours = row.joules.get(OURS)
    if ours is None:
        return ["–", "–"]
    least = min((row.joules[name] for name in _rivals(row.joules)), default=None)
    ratio = None if least is None else least / ours
    return [_number(row.flops / ours / 1e12, ".2f"), _number(ratio, ".2f")]


def _caption(report: Report) -> Iterator[str]:
    machine = report.machine
    yield (
        f"TFLOP/s in {report.dtype}, {machine.chip}, {report.date}: medians of {report.rounds} "
        f"rounds in shuffled order; torch {machine.torch}, driver {machine.driver}. The ceiling is "
        f"{report.ceiling}, measured between them: {_median_ceiling(report):.0f} in the median."
    )
    sources = [f"{TITLES[name]}: {source}" for name, source in report.peers.items()]
    absent = [f"{TITLES[name]} was absent" for name in report.absent]
    yield "; ".join([*sources, *absent]) + "."


def _median_ceiling(report: Report) -> float:
    return statistics.median(row.ceiling_tflops for row in report.rows)


def _emphasised(figure: float | None, best: float) -> str:
    text = _number(figure, ".0f")
    return f"**{text}**" if figure == best else text


def _mean(mean: Mean | None) -> str:
    return "–" if mean is None else f"{mean.ratio:.3f}"


def _number(figure: float | None, form: str) -> str:
    return "–" if figure is None else format(figure, form)
