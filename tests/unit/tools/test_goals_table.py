"""Docs' tables of goals say what the reports say, and what a run misses has attempts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import MeasureError
from tests.support.paths import ROOT
from tools import goals_table

RESULTS = ROOT / "docs" / "results"
LIMITS = ROOT / "docs" / "internals" / "performance" / "limits.md"
NAMED = re.compile(r"`([^`]+)`|\[[^]]+\]\([^)]+\)")


def cells(path: Path) -> dict[str, list[str]]:
    lines = [line.strip("| ") for line in goals_table.markdown(path)]
    return {name.strip("*`"): rest for name, *rest in (line.split(" | ") for line in lines[2:])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs of the backward, of which the second misses goals in its first two rows."""
    for name in ("backward", "backward-call"):
        run = json.loads((RESULTS / f"{name}.json").read_text())
        for row in run["rows"]:
            row |= {"ratio": 1.5, "share": 0.875, "deterministic": 0.9375}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    run["rows"][0] |= {"ratio": 1.25}
    run["rows"][1] |= {"ratio": 1.01}
    run["means"]["best"]["ratio"] = 1.1
    (tmp_path / "backward-call.json").write_text(json.dumps(run))
    return tmp_path


def test_a_goal_is_held_where_each_run_reaches_it(folder: Path) -> None:
    found = cells(folder / "backward-goals")
    assert found["0.66 of cuBLAS at 256"] == ["0.875 to 0.875", "0.875 to 0.875", "yes"]
    assert found["1.10 x in the geometric mean"][1:] == ["1.100", "yes"]
    assert goals_table.missed_of(folder, "backward") == [
        "1.02 x in each row", "1.25 x at 512 tokens",
    ]  # fmt: skip


def test_rows_that_miss_a_goal_stand_below_it(folder: Path) -> None:
    found = cells(folder / "backward-goals")
    assert found["1.02 x in each row"][1:] == ["1.010 to 1.500, 1 of 20 below", "no"]
    name = json.loads((folder / "backward.json").read_text())["rows"][1]["case"]
    assert found[name][:2] == ["1.500", "**1.010**"]
    assert list(found).count(name) == 1 and sum(each.startswith("b") for each in found) == 1


def test_a_goal_of_one_run_is_not_said_to_hold_in_two(folder: Path) -> None:
    (folder / "backward-call.json").unlink()
    assert cells(folder / "backward-goals")["1.05 x at 256"][-1] == "in one run"


def test_variants_are_held_to_the_plain_call_of_their_run() -> None:
    found = cells(RESULTS / "variants-goals")
    beside = json.loads((RESULTS / "variant-peers.json").read_text())["rows"]
    rate = {x["variant"]: x["tflops"]["attngen"] for x in beside if x["direction"] == "fwd"}
    alone = json.loads((RESULTS / "variants.json").read_text())["rows"]
    own = next(x for x in alone if (x["variant"], x["direction"]) == ("softcap", "fwd"))["ratio"]
    figures = [f"{x:.3f}" for x in (own, rate["softcap"] / rate["plain"])]
    assert [x.strip("*") for x in found["softcap 0.90"][:2]] == figures


def test_decode_is_held_to_the_fastest_peer() -> None:
    rows = json.loads((RESULTS / "decode.json").read_text())["rows"]
    ratios = [
        x["gbps"]["attngen"] / max(rate for who, rate in x["gbps"].items() if who != "attngen")
        for x in rows
        if x["case"].endswith("-p16")
    ]
    span = cells(RESULTS / "decode-goals")["1.0 x over pages of 16"][0]
    assert span.startswith(f"{min(ratios):.3f} to {max(ratios):.3f}")


@pytest.mark.parametrize("subject", goals_table.SUBJECTS)
def test_what_a_run_misses_has_three_attempts_and_what_binds(subject: str) -> None:
    written = dict(rows_of(f"{subject.capitalize()}"))
    missed = goals_table.missed_of(RESULTS, subject)
    assert missed, "the page's section has nothing left to say"
    for goal in missed:
        tried, binds = written[goal]
        attempts = [each for part in re.split(r"[;,]| and ", tried) if (each := part.strip())]
        assert len(attempts) >= 3 and NAMED.search(tried) and binds, goal


def rows_of(section: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each goal of a section with what was tried and what binds."""
    text = LIMITS.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    for line in text.split("| goal | tried | what binds |")[1].splitlines()[2:]:
        if line.startswith("| "):
            goal, tried, binds = line.strip("| ").split(" | ")
            yield goal, (tried, binds)


def test_experiments_that_the_page_names_are_there() -> None:
    experiments: dict[str, Any] = json.loads((RESULTS / "experiments.json").read_text())
    names = set(experiments)
    for each in experiments.values():
        if isinstance(each, list):
            names |= {one["name"] for one in each}
    prose = re.sub(r"<!-- table.*?<!-- end of table -->", "", LIMITS.read_text(), flags=re.DOTALL)
    words = re.findall(r"`([^`]+)`", prose)
    named = {name for name in words if not name.endswith((".json", ".py"))}
    assert named - names <= {"operator", "call", "again", "attngen tune"}


def test_folder_without_reports_and_unknown_goals_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match="no goals of 'sideways'; there are forward, "):
        list(goals_table.markdown(tmp_path / "sideways-goals"))
    shutil.copy(RESULTS / "decode.json", tmp_path)
    for name in ("variants", "variant-peers", "experiments"):
        (tmp_path / f"{name}.json").write_text("{}")
    for subject, message in (("variants", "reports of variants"), ("decode", "earlier table")):
        with pytest.raises(MeasureError, match=message):
            list(goals_table.markdown(tmp_path / f"{subject}-goals"))
