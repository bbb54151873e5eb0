"""The guide's table of runs beside each other says what the reports of docs/results say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import MeasureError
from tools import runs_table

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


@pytest.fixture
def again(tmp_path: Path) -> Path:
    """The report of another day beside two others, whose second case it lacks."""
    for name in ("backward.json", "backward-call.json"):
        shutil.copy(RESULTS / name, tmp_path)
    report = read("backward.json")
    first, _, *others = report["rows"]
    first |= {"ratio": 1.5, "share": 0.25, "deterministic": None}
    path = tmp_path / "backward-again.json"
    path.write_text(json.dumps(report | {"date": "2031-05-06", "rows": [first, *others]}))
    return path


def test_a_case_has_a_cell_of_each_run(again: Path) -> None:
    lines = [*runs_table.markdown(again)]
    assert lines[0] == "| case | operator | call | operator again |"
    for place, last in enumerate(("1.50, 25%", "–")):
        row = read("backward-call.json")["rows"][place]
        own = f"{row['ratio']:.2f}, {row['share']:.0%}, {row['deterministic']:.2f}"
        cells = lines[2 + place].strip("| ").split(" | ")
        assert [cells[0], *cells[2:]] == [f"`{row['case']}`", own, last]
    report = read("backward.json")
    budget = f"{report['rounds']} rounds of {report['budget_ms']:g} ms"
    assert lines[-1].endswith(f"; operator again, 2031-05-06, {budget}.")


def test_runs_of_other_cases_are_refused(again: Path) -> None:
    report = json.loads(again.read_text())
    report["rows"][0]["case"] = "b1-s1k-h1-d8-full"
    again.write_text(json.dumps(report))
    with pytest.raises(MeasureError, match="other cases"):
        list(runs_table.markdown(again))


def test_only_reports_of_another_run_have_this_table() -> None:
    names = ("backward-call-again.json", "backward-call.json", "forward.json")
    assert [*map(runs_table.is_again, map(Path, names))] == [True, False, False]
