"""The README's tables and the reports that they come from cannot drift apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attngen.bench import report
from attngen.errors import MeasureError
from tools import render_readme

RESULTS = "docs/results/forward.json"
BLOCK = "before\n<!-- table: {path} -->\nold\n<!-- end of table -->\nafter\n"


def test_render_replaces_what_stands_between_the_marks() -> None:
    text, count = render_readme.render(BLOCK.format(path=RESULTS), render_readme.ROOT)
    assert count == 1
    assert text.startswith(f"before\n<!-- table: {RESULTS} -->\n\n| case |")
    assert text.endswith("\n\n<!-- end of table -->\nafter\n") and "old" not in text
    for row in report.read(render_readme.ROOT / RESULTS).rows:
        assert f"| `{row.case}` | " in text
    assert render_readme.render(text, render_readme.ROOT) == (text, 1)


def test_render_unreadable_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(MeasureError, match="odd.json"):
        render_readme.render(BLOCK.format(path="odd.json"), tmp_path)


def test_render_variants_beside_their_peers(tmp_path: Path) -> None:
    report = {
        "case": "b1", "date": "2026-01-01", "rounds": 3, "peers": {"cudnn": "cuDNN 1"},
        "machine": {"chip": "C", "torch": "2", "driver": "5"},
        "rows": [
            {"variant": "alibi", "direction": "fwd", "tflops": {"attngen": 500.4, "cudnn": 250},
             "ratio": 2.004},
            {"variant": "alibi", "direction": "bwd", "tflops": {"attngen": 300}, "ratio": None},
            {"variant": "sink", "direction": "fwd", "tflops": {"attngen": 7}, "ratio": None},
            {"variant": "sink", "direction": "bwd", "tflops": {"attngen": 8}, "ratio": None},
        ],
    }  # fmt: skip
    (tmp_path / "variant-peers.json").write_text(json.dumps(report))
    text, _ = render_readme.render(BLOCK.format(path="variant-peers.json"), tmp_path)
    assert "| variant | attngen | cuDNN | to best peer |\n|---|---:|---:|---:|\n" in text
    assert "| alibi | 500 / 300 | 250 / – | 2.00 / – |\n| sink | 7 / 8 | – | – |\n" in text
    (tmp_path / "variant-peers.json").write_text("[]")
    with pytest.raises(MeasureError, match="variant-peers.json"):
        render_readme.render(BLOCK.format(path="variant-peers.json"), tmp_path)


def test_main_check_fails_on_a_difference_and_writes_nothing(tmp_path: Path, capsys) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(BLOCK.format(path=RESULTS))
    arguments = ["--file", str(readme)]
    assert render_readme.main([*arguments, "--check"]) == 1
    assert "make generated" in capsys.readouterr().out and "old" in readme.read_text()
    assert render_readme.main(arguments) == 0
    assert render_readme.main([*arguments, "--check"]) == 0


def test_main_file_without_tables_is_refused(tmp_path: Path, capsys) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no marks\n")
    assert render_readme.main(["--file", str(readme), "--check"]) == 1
    assert "no table" in capsys.readouterr().err


def test_main_readme_of_the_project_is_rendered() -> None:
    assert render_readme.main(["--check"]) == 0
