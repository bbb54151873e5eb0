"""Benchmarks that are interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from attngen.bench import peers, report, run
from attngen.bench.report import make_row
from attngen.bench.workloads import CASES
from attngen.cli.main import main

ROWS = tuple(make_row(name, 10**12, {"attngen": 2.0}, 800.0, {}) for name in "ab")


@pytest.mark.parametrize("timed", [0, 2])
def test_interrupted_bench_writes_what_it_has_timed(
    timed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = iter([*ROWS][:timed])

    def time_case(*_: object) -> report.Row:
        try:
            return next(found)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(run, "require_gpu", lambda: "sm_90a")
    monkeypatch.setattr(run, "time_case", time_case)
    monkeypatch.setattr(peers, "load", lambda names: ({}, {}))
    path = tmp_path / "report.json"
    result = CliRunner().invoke(main, ["bench", "fwd", "--json", str(path)])
    assert result.exit_code == 1
    if not timed:
        assert not path.exists()
        return
    assert f"stopped: 2 of {len(CASES)} cases were timed" in result.output
    assert report.read(path).rows == ROWS
