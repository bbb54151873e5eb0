"""The report of a chip: what is run, and what becomes of what it leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen.bench import decode_report, workloads
from tests.support.paths import ROOT
from tools import gpu_suite, report_chip

JUNIT = """<testsuites><testsuite><testcase classname="a" name="right"/>
<testcase classname="a" name="wrong"><failure message="0.1 &gt; 0.01"/></testcase>
</testsuite></testsuites>"""


def test_commands_name_tests_and_cases_that_there_are(tmp_path: Path) -> None:
    found = report_chip.commands(tmp_path, 3)
    for number, command in enumerate(found["tests"], 1):
        assert f"--shard={number}/3" in command
        assert all((ROOT / each).is_file() and each in command for each in report_chip.TESTS)
    assert len(found["tests"]) == 3
    there = (ROOT / "tests/gpu").glob("test_*.py")
    of_any_chip = {each for each in there if "any_chip" in each.read_text()}
    assert {ROOT / each for each in report_chip.TESTS} == of_any_chip
    assert len(workloads.select(report_chip.CASES.split(","))) >= 8
    assert len(workloads.select(report_chip.GRADIENTS.split(","))) >= 4
    decodes = workloads.select_named(report_chip.DECODES.split(","), decode_report.CASES)
    assert len(decodes) == 2
    for name in ("speed", "speed_of_gradients", "speed_of_decode"):
        assert found[name][0][-1] == str(tmp_path / f"{name}.json")
    assert list(found) == list(report_chip.SHARES)


def test_steps_end_in_their_order_within_the_limit() -> None:
    ends = list(report_chip.deadlines(1000.0, report_chip.LIMIT).values())
    assert ends == sorted(ends) and ends[0] > 1000
    assert ends[-1] == pytest.approx(1580)
    last = list(report_chip.deadlines(0.0, 100.0).values())[-1]
    assert last == pytest.approx(100)


def test_report_joins_what_was_left_and_says_what_was_not(tmp_path: Path) -> None:
    (tmp_path / "tests-1.xml").write_text(JUNIT)
    (tmp_path / "tests-2.xml").write_text(JUNIT.replace('"a"', '"b"'))
    (tmp_path / "tests-3.xml").write_text("<testsuites/>")  # stopped before its first test
    found = report_chip.collect(tmp_path, {"tests": 1, "speed": 2})
    assert (found["tests"]["passed"], found["tests"]["failed"]) == (2, 2)
    assert found["speed"] == {"error": "no figures: FileNotFoundError"}
    assert found["exit"] == {"tests": 1, "speed": 2}
    for each in tmp_path.glob("tests-*.xml"):
        each.unlink()
    (tmp_path / "speed.json").write_text('{"rows": []}')
    found = report_chip.collect(tmp_path, {})
    assert found["tests"] == {"error": "no report of tests"} and found["speed"] == {"rows": []}


@pytest.mark.parametrize("status", [0, 1])
def test_main_writes_the_file_whatever_failed(
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran: list[str] = []

    def start(command: list[str], gpus: list[str], output: Path) -> SimpleNamespace:
        assert gpus == ["3"]
        ran.append(command[2])
        output.write_text("one\ntwo")
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(report_chip, "missing", lambda: None)
    monkeypatch.setattr(report_chip, "describe_machine", lambda: {"chip": "one"})
    monkeypatch.setattr(report_chip, "processes", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(report_chip.gpu_suite, "start", start)
    ends: list[float] = []
    monkeypatch.setattr(report_chip.gpu_suite, "finish", lambda parts, end: ends.append(end))
    began = time.monotonic()
    assert report_chip.main(["-o", str(tmp_path / "x.json"), "--limit", "50"]) == status
    assert len(ends) == 4 and began < ends[0] < ends[-1] < time.monotonic() + 50
    assert ran == [*["pytest"] * 2, *["attngen"] * 3]
    assert ("two" in capsys.readouterr().out) == bool(status)
    assert json.loads((tmp_path / "x.json").read_text())["machine"] == {"chip": "one"}


def test_an_interrupted_run_leaves_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its second step, whose command ends by itself soon after."""
    place = tmp_path / "x.json"
    quick = [sys.executable, "-c", "print('done')"]
    slow = "import pathlib, time; time.sleep(0.5); pathlib.Path(r'{}').write_text('[1]')"

    def commands(folder: Path, parts: int) -> dict[str, list[list[str]]]:
        (folder / "tests-1.xml").write_text(JUNIT)
        speed = [sys.executable, "-c", slow.format(folder / "speed.json")]
        return {"tests": [quick], "speed": [speed], "speed_of_gradients": [quick]}

    finish, ends = gpu_suite.finish, []

    def interrupted(parts: Any, end: float) -> None:
        ends.append(end)
        if len(ends) == 2:
            assert json.loads(place.read_text())["exit"] == {"tests": 0}
            os.kill(os.getpid(), signal.SIGTERM)
        finish(parts, end)

    monkeypatch.setattr(report_chip, "missing", lambda: None)
    monkeypatch.setattr(report_chip, "processes", lambda: 1)
    monkeypatch.setattr(report_chip, "commands", commands)
    monkeypatch.setattr(report_chip, "describe_machine", lambda: {"chip": "one"})
    monkeypatch.setattr(report_chip.gpu_suite, "finish", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert report_chip.main(["-o", str(place)]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads(place.read_text())
    assert found["exit"] == {"tests": 0, "speed": report_chip.INTERRUPTED}
    assert found["tests"]["passed"] == 1 and found["speed"] == [1]
    assert "error" in found["speed_of_gradients"]
    assert "interrupted in speed" in capsys.readouterr().out


def test_a_place_without_a_directory_is_known_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_chip, "missing", lambda: None)
    with pytest.raises(SystemExit):
        report_chip.main(["-o", str(tmp_path / "none" / "x.json")])
    assert f"there is no directory {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("available", "capability", "why"),
    [
        (False, (8, 0), "PyTorch sees none"),
        (True, (7, 5), "no kernels for compute capability 7.5; there are: sm_90a"),
        (True, (8, 9), None),
    ],
)
def test_main_runs_nothing_where_there_are_no_kernels(
    available: bool,
    capability: tuple[int, int],
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if why is None:
        assert report_chip.missing() is None
        return
    with pytest.raises(SystemExit) as caught:
        report_chip.main(["-o", str(tmp_path / "x.json")])
    assert caught.value.code == 2 and why in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
