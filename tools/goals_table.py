"""The tables of docs' page of limits: each goal, what each run of it says, and whether it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from attngen.bench import decode_report, report
from attngen.errors import MeasureError
from tools import runs_table

END = "-goals"  # ends the name of a table: docs/results/forward-goals
MEAN = "geometric mean"  # the row of a run's means
Rows = Mapping[str, Mapping[str, float]]  # of a run: row → what was measured → figure


@dataclass(frozen=True)
class Goal:
    """A figure that `rows` of every run reach. rows: patterns of names, of which one fits."""

    label: str
    asked: float
    measure: str
    rows: tuple[str, ...] = ("b*",)

    def figures(self, run: Rows) -> dict[str, float]:
        """The figure of each row of a run that the goal is about and the run has."""
        return {
            name: row[self.measure]
            for name, row in run.items()
            if self.measure in row and any(fnmatchcase(name, each) for each in self.rows)
        }


FORWARD = (
    Goal("1.12 x in the geometric mean", 1.12, "ratio", (MEAN,)),
    Goal("1.02 x in each row", 1.02, "ratio"),
    Goal("1.05 x at 256", 1.05, "ratio", ("*-d256-*",)),
    Goal("0.80 of cuBLAS at 64", 0.80, "share", ("*-d64-*",)),
    Goal("1.25 x at 512 tokens", 1.25, "ratio", ("*-s512-*",)),
)
BACKWARD = (
    Goal("1.10 x in the geometric mean", 1.10, "ratio", (MEAN,)),
    Goal("1.02 x in each row", 1.02, "ratio"),
    Goal("1.05 x at 256", 1.05, "ratio", ("*-d256-*",)),
    Goal("0.66 of cuBLAS at 256", 0.66, "share", ("*-d256-*",)),
    Goal("0.78 of cuBLAS at 64", 0.78, "share", ("*-d64-*",)),
    Goal("1.25 x at 512 tokens", 1.25, "ratio", ("*-s512-*",)),
    Goal("deterministic 0.93 of ordinary", 0.93, "deterministic"),
)
SUMMED = "bias of keys, summed"  # an experiment on the kernels that a bias of keys has
VARIANTS = (
    Goal("bias 0.85 of plain", 0.85, "fwd", ("bias*", "pre_scale bias")),
    Goal("softcap 0.90", 0.90, "fwd", ("softcap",)),
    Goal("dropout 0.80", 0.80, "fwd", ("dropout",)),
    Goal("bias of keys 0.80 of plain, backward", 0.80, "bwd", ("bias of keys", "*, bias of keys")),
)
DECODE = (Goal("1.0 x over pages of 16", 1.0, "ratio", ("*-p16",)),)


def is_goals(path: Path) -> bool:
    return path.name.endswith(END)


def markdown(path: Path) -> Iterator[str]:
    """A goal a row, a run a column; below a goal that a run misses, the rows that miss it.

    path: the table's name in the folder of the reports. Raises: MeasureError, OSError.
    """
    subject = path.name.removesuffix(END)
    if subject not in SUBJECTS:
        raise MeasureError(f"{path}: no goals of {subject!r}; there are {', '.join(SUBJECTS)}")
    goals, read = SUBJECTS[subject]
    runs = read(path.parent)
    yield f"| goal | {' | '.join(runs)} | holds |"
    yield f"|---|{'---:|' * len(runs)}---|"
    for goal in goals:
        yield from _lines(goal, [goal.figures(run) for run in runs.values()])


def missed_of(folder: Path, subject: str) -> list[str]:
    """The goals of a subject that a run of the folder misses. Raises: MeasureError, OSError."""
    goals, read = SUBJECTS[subject]
    runs = read(folder).values()
    return [
        goal.label
        for goal in goals
        if any(each < goal.asked for run in runs for each in goal.figures(run).values())
    ]


def _lines(goal: Goal, found: list[dict[str, float]]) -> Iterator[str]:
    """A goal, then its rows that miss it in a run; figures that miss it are bold."""
    below = {name for run in found for name, each in run.items() if each < goal.asked}
    runs = sum(map(bool, found))
    holds = "no" if below else "yes" if runs > 1 else "in one run"
    yield f"| **{goal.label}** | {' | '.join(_span(goal, each) for each in found)} | {holds} |"
    names = dict.fromkeys(name for run in found for name in run)
    for name in names if len(names) > 1 else ():
        if name in below:
            cells = (_figure(goal, each.get(name)) for each in found)
            yield f"| `{name}` | {' | '.join(cells)} | |"


def _span(goal: Goal, found: dict[str, float]) -> str:
    """The least and the greatest figure, and how many are below the goal."""
    if not found:
        return "–"
    least, most = min(found.values()), max(found.values())
    if len(found) == 1:
        return _figure(goal, least)
    few = sum(each < goal.asked for each in found.values())
    return f"{least:.3f} to {most:.3f}" + f", {few} of {len(found)} below" * bool(few)


def _figure(goal: Goal, figure: float | None) -> str:
    if figure is None:
        return "–"
    return f"{figure:.3f}" if figure >= goal.asked else f"**{figure:.3f}**"


def _beside_peers(direction: str, folder: Path) -> dict[str, Rows]:
    """Runs of one direction beside the peers, by their names and days."""
    runs: dict[str, Rows] = {}
    for title, run in runs_table.read_runs(folder, direction).items():
        rows: dict[str, dict[str, float]] = {MEAN: {"ratio": run.means["best"].ratio}}
        for row in run.rows:
            found = {"ratio": row.ratio, "share": row.share, "deterministic": row.deterministic}
            rows[row.case] = {name: each for name, each in found.items() if each is not None}
        runs[f"{title}, {run.date}" + f", {len(run.rows)} rows" * (len(run.rows) < 20)] = rows
    return runs


def _variants(folder: Path) -> dict[str, Rows]:
    """Variants over the plain call of their run. The run beside peers is older than the backward's
    kernel of a bias of keys, which an experiment has beside that of variants."""
    try:
        alone, beside, experiments = (
            json.loads((folder / f"{name}.json").read_text())
            for name in ("variants", "variant-peers", "experiments")
        )
        own = {(x["variant"], x["direction"]): x["ratio"] for x in alone["rows"]}
        rates = {(x["variant"], x["direction"]): x["tflops"]["attngen"] for x in beside["rows"]}
        others = {key: x / rates["plain", "fwd"] for key, x in rates.items() if key[1] == "fwd"}
        summed = next(x for x in experiments["backward_variants"] if x["name"] == SUMMED)
        keys = {
            f"{row['case']}, bias of keys": {"bwd": row["of plain"]["row, summed"]}
            for row in summed["rows"]
        }
        return {
            f"beside plain, {alone['date']}": _by_variant(own),
            f"beside peers, {beside['date']}": _by_variant(others),
            f"`{SUMMED}`, {summed['date']}": keys,
        }
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        raise MeasureError(f"{folder} has no reports of variants") from error


def _by_variant(ratios: Mapping[tuple[str, str], float]) -> Rows:
    rows: dict[str, dict[str, float]] = {}
    for (variant, direction), ratio in ratios.items():
        rows.setdefault(variant, {})[direction] = ratio
    return rows


def _decode(folder: Path) -> dict[str, Rows]:
    """Rates over the fastest peer's, of the report and of the one before it."""
    now = decode_report.read(folder / "decode.json")
    try:
        before = json.loads((folder / "experiments.json").read_text())["decode_earlier_table"]
        rows = {row["case"]: _over_best(row["gbps"]) for row in before["rows"]}
        day = before["date"]
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureError(f"{folder} has no earlier table of decode") from error
    return {
        f"decode, {now.date}": {row.case: _over_best(row.gbps) for row in now.rows},
        f"earlier table, {day}": rows,
    }


def _over_best(gbps: Mapping[str, float]) -> dict[str, float]:
    best = max(rate for who, rate in gbps.items() if who != report.OURS)
    return {"ratio": gbps[report.OURS] / best}


SUBJECTS: dict[str, tuple[tuple[Goal, ...], Callable[[Path], Mapping[str, Rows]]]] = {
    "forward": (FORWARD, lambda folder: _beside_peers("forward", folder)),
    "backward": (BACKWARD, lambda folder: _beside_peers("backward", folder)),
    "variants": (VARIANTS, _variants),
    "decode": (DECODE, _decode),
}
