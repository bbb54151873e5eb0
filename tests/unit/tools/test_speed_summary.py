"""README's table of speed says what the reports of docs/results say."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from attngen.errors import MeasureError
from tools import speed_summary

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def rows_of(folder: Path) -> dict[str, list[str]]:
    lines = [line for line in speed_summary.markdown(folder) if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {name: rest for name, *rest in cells}


def test_rows_are_means_of_the_reports() -> None:
    found = rows_of(RESULTS)
    assert len(found) == 6
    forward = json.loads((RESULTS / "forward-call.json").read_text())["means"]
    wanted = [f"{forward[peer]['ratio']:.2f}" for peer in ("fa3", "cudnn", "best")]
    assert found["forward"] == [str(forward["best"]["rows"]), *wanted]
    decode = json.loads((RESULTS / "decode.json").read_text())["rows"]
    ratios = [x["gbps"]["attngen"] / max(x["gbps"][n] for n in ("fa3", "cudnn-paged"))
              for x in decode]  # fmt: skip
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert found["one query a sequence, over pages"][-1] == f"{mean:.2f}"


def test_caption_has_the_day_of_each_run() -> None:
    *_, caption = speed_summary.markdown(RESULTS)
    reports = ("forward-call", "backward", "decode", "variant-peers")
    days = [json.loads((RESULTS / f"{name}.json").read_text())["date"] for name in reports]
    pages = "the forward on {}, the backward on {}, pages on {}, the others on {}."
    assert caption.endswith(pages.format(*days))


def test_repeatable_rows_compare_deterministic_modes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RESULTS, tmp_path / "r", ignore=lambda *_: ["experiments.json"]))
    report = json.loads((folder / "backward.json").read_text())
    for row in report["rows"]:
        row["tflops"] |= {"attngen-det": 300.0, "fa3-det": 200.0}
    (folder / "backward.json").write_text(json.dumps(report))
    name = "backward, the same bits on every run"
    assert rows_of(folder)[name] == [str(len(report["rows"])), "1.50", "–", "1.50"]


def test_report_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "variant-peers.json").write_text("[]")
    with pytest.raises(MeasureError, match="variant-peers"):
        speed_summary.read_variants(tmp_path / "variant-peers.json")
