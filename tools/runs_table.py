"""The guide's table of one direction's runs beside each other: both ways of timing, and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attngen.bench import report
from attngen.bench.report import Report, Row
from attngen.errors import MeasureError

AGAIN = "-again"  # ends the name of a report of another run
# What a report's name ends with → its column.
TITLES = {"": "operator", "-call": "call", AGAIN: "operator again", f"-call{AGAIN}": "call again"}


def is_again(path: Path) -> bool:
    return path.stem.endswith(AGAIN)


def markdown(path: Path) -> Iterator[str]:
    """A case a row, a run a column, of those that there are beside the report of another run.

    path: of that one, as `backward-call-again.json`. Raises: MeasureError, OSError where a run
    cannot be read, or has a case that the first has not.
    """
    stem = path.name.partition("-")[0].removesuffix(".json")
    runs = read_runs(path.parent, stem)
    backward = next(iter(runs.values())).direction == "bwd"
    rows = {title: {row.case: row for row in run.rows} for title, run in runs.items()}
    cases = next(iter(rows.values()))
    if any(each.keys() - cases.keys() for each in rows.values()):
        raise MeasureError(f"{path.parent}: runs of {stem} have other cases")
    yield f"| case | {' | '.join(runs)} |"
    yield f"|---|{'---:|' * len(runs)}"
    for case in cases:
        cells = (_cell(each.get(case), backward) for each in rows.values())
        yield f"| `{case}` | {' | '.join(cells)} |"
    means = (f"{run.means['best'].ratio:.2f}" for run in runs.values())
    yield f"| geometric mean | {' | '.join(means)} |"
    yield ""
    more = ", of the backward det. to ordinary" * backward
    yield f"Speed over the best peer's, share of cuBLAS' rate in the same rounds{more}. Runs:"
    yield "; ".join(f"{title}, {_origin(run)}" for title, run in runs.items()) + "."


def read_runs(folder: Path, direction: str) -> dict[str, Report]:
    """The reports of a direction that there are, by their columns' titles.

    direction: with which their names begin, `forward` or `backward`. Raises: MeasureError, OSError.
    """
    files = {title: folder / f"{direction}{end}.json" for end, title in TITLES.items()}
    return {title: report.read(each) for title, each in files.items() if each.is_file()}


def _cell(row: Row | None, backward: bool) -> str:
    if row is None or row.ratio is None or row.share is None:
        return "–"
    ordered = f", {row.deterministic:.2f}" if backward and row.deterministic is not None else ""
    return f"{row.ratio:.2f}, {row.share:.0%}{ordered}"


def _origin(run: Report) -> str:
    return f"{run.date}, {run.rounds} rounds of {run.budget_ms:g} ms"
