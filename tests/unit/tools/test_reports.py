"""Reports of tools that measure on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.reports import write_rows


def measured(path: Path | None) -> Iterator[dict[str, Any]]:
    """Two rows, before the second of which the first is on the disk; then the device is lost."""
    yield {"case": "first"}
    if path is not None:
        assert json.loads(path.read_text())["rows"] == [{"case": "first"}]
    yield {"case": "second"}
    raise RuntimeError("device lost")


def test_report_of_a_run_that_breaks_has_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(RuntimeError, match="device lost"):
        write_rows(path, 3, measured(path), rounds=7)
    report = json.loads(path.read_text())
    assert [row["case"] for row in report["rows"]] == ["first", "second"]
    assert (report["schema"], report["rounds"]) == (3, 7) and report["machine"]["python"]


def test_rows_without_a_file_are_measured_alone() -> None:
    with pytest.raises(RuntimeError, match="device lost"):
        write_rows(None, 3, measured(None))
