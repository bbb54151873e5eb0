"""tools/doors_speed.py: rows of steps, and the table that is made of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.errors import MeasureError
from tools import doors_speed, doors_table


def row(**ms: float) -> dict[str, Any]:
    timed = {
        who: SimpleNamespace(milliseconds=lambda calls, taken=taken: taken)
        for who, taken in ms.items()
    }
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(doors_speed.MAKERS, "train", lambda model, length: None)
    task = doors_speed.Task("llama-8b", ("train",), 4096)
    made = doors_speed.Row(None, task, "train")
    made.timed, made.missing = timed, {"cudnn": "refused"}
    monkeypatch.undo()
    return made.measured(3)


def test_row_holds_medians_beside_the_best_peer() -> None:
    found = row(attngen=2.0, flash=3.0, flex=5.0)
    assert found["ms"] == {"attngen": 2.0, "flash": 3.0, "flex": 5.0}
    assert (found["best_peer"], found["ratio"]) == ("flash", 1.5)
    assert row(flash=3.0)["ratio"] is None and row(attngen=3.0)["best_peer"] is None


def test_what_compiles_for_long_is_ended() -> None:
    with pytest.raises(MeasureError, match="not compiled in time"):
        with doors_speed._ended(time.monotonic() + 0.05):
            time.sleep(20)
    with doors_speed._ended(time.monotonic() + 0.05):
        pass
    time.sleep(0.1)


def test_table_has_a_line_a_row_and_names_who_is_missing(tmp_path: Path) -> None:
    machine = {"chip": "A chip", "torch": "2", "driver": "1"}
    report = {
        **{"machine": machine, "date": "2026-11-30", "rounds": 3, "layers": 2, "sequences": 8},
        **{"versions": {"transformers": "5"}, "rows": [row(attngen=2.0, flash=3.0)]},
    }
    path = tmp_path / "doors.json"
    path.write_text(json.dumps(report))
    head, _, line, _, about = doors_table.markdown(path)
    assert head == "| stack | step | tokens | attngen | sdpa flash | sdpa cuDNN | to best peer |"
    assert line == "| llama-8b | train | 4096 | 2 | 3 | – | 1.50 |"
    assert "A chip" in about
    path.write_text("{}")
    with pytest.raises(MeasureError, match="doors_speed"):
        list(doors_table.markdown(path))
