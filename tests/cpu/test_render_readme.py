"""The README's tables and the reports that they come from cannot drift apart."""

from __future__ import annotations

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
