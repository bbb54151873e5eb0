"""tools/gpu_suite.py: how a run is cut, and what becomes of its parts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from attngen import AttentionSpec
from tests.support.devices import turn_devices
from tests.support.forward_kit import DENSE
from tools import gpu_suite

WAITS = """
import time
try:
    print("on", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("told")
"""


@pytest.mark.parametrize(
    "worker, devices, wanted",
    [
        ("gw0", "0,1", "0,1"),
        ("gw1", "0,1", "1,0"),
        ("gw5", "2,0,1", "1,2,0"),
        ("gw1", "3", "3"),
        ("master", "0,1", "0,1"),
    ],
)
def test_processes_take_gpus_in_turn(worker: str, devices: str, wanted: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": devices, "PYTEST_XDIST_WORKER": worker}
    turn_devices(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == wanted
    nothing: dict[str, str] = {"PYTEST_XDIST_WORKER": "gw1"}
    turn_devices(nothing)
    assert nothing == {"PYTEST_XDIST_WORKER": "gw1"}


def test_shards_cover_each_tool(tmp_path) -> None:
    found = list(gpu_suite.sanitizer_commands("compute-sanitizer", tmp_path))
    assert len({log for log, _ in found}) == len(found) == 3 * gpu_suite.SHARDS
    of_race = [command for _, command in found if "racecheck" in command]
    assert [command[-1] for command in of_race] == [f"{n}/5" for n in range(1, 6)]


def test_a_named_target_is_run_and_recorded(monkeypatch, tmp_path: Path) -> None:
    """Parts hear of it, kernels are built once, and the report says whose they were."""
    started: list[list[str]] = []
    named: list[str] = []

    def start(command: list[str], gpus: list[str], output: Path) -> str:
        started.append(command)
        named.append(gpu_suite.os.environ[gpu_suite.target.VARIABLE])
        return "part"

    monkeypatch.setenv(gpu_suite.target.VARIABLE, "")
    monkeypatch.setattr(gpu_suite, "gpu_names", lambda: ["0"])
    monkeypatch.setattr(gpu_suite.os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr(gpu_suite, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(gpu_suite, "start", start)
    monkeypatch.setattr(gpu_suite, "finish", lambda parts, deadline: None)
    told: list[list[str]] = []
    monkeypatch.setattr(gpu_suite.gpu_results, "main", lambda given: told.append(given) or 0)
    options = ["--target", "sm_90", "--each", "2", "--logs", str(tmp_path), "-o", "found.json"]
    assert gpu_suite.main(options) == 0
    build, other, tests, *shards = started
    assert "--build-only=1/2" in build and "--build-only=2/2" in other
    assert "--built" in tests and len(shards) == 3 * gpu_suite.SHARDS
    assert "--each=2" in build and "--each=2" in tests
    assert set(named) == {"sm_90"}
    assert told[0][-4:] == ["--target", "sm_90", "--output", "found.json"]


def test_nothing_runs_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "")  # where no tool of a driver is
    with pytest.raises(SystemExit):
        gpu_suite.main(["-o", str(tmp_path / "x.json"), "--logs", str(tmp_path / "logs")])
    assert "nvidia-smi names none" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_nothing_runs_where_kernels_would_not_compile(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_suite, "gpu_names", lambda: ["0"])
    monkeypatch.setattr(gpu_suite.cutlass, "version", lambda: None)
    logs = tmp_path / "logs"
    with pytest.raises(SystemExit, match="2"):
        gpu_suite.main(["-o", str(tmp_path / "out.json"), "--logs", str(logs)])
    assert "needs nvidia-cutlass" in capsys.readouterr().err and not logs.exists()


@pytest.fixture
def deaf() -> Iterator[None]:
    """Interrupts are ignored, as in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def test_parts_that_reach_the_limit_are_interrupted(deaf: None, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    part = gpu_suite.start([sys.executable, "-c", WAITS], ["0"], said)
    until = time.monotonic() + 60
    while b"on" not in said.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.01)
    gpu_suite.finish([part], time.monotonic())
    assert said.read_bytes() == b"on\ntold\n" and part.returncode == 0


def test_parts_find_what_the_suite_does(monkeypatch, tmp_path: Path) -> None:
    """A path that the caller names reaches the parts, behind the checkout."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    said = tmp_path / "said.txt"
    part = gpu_suite.start(
        [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], ["0"], said
    )
    gpu_suite.finish([part], time.monotonic() + 60)
    assert said.read_text().split(os.pathsep) == [".", "elsewhere\n"]


def test_build_only_builds_what_tests_launch_and_runs_none(monkeypatch, capsys) -> None:
    from tests.gpu import conftest

    built: list[object] = []
    monkeypatch.setattr(conftest.attngen, "build", lambda spec, arch: built.append(spec))
    specs = [object(), object()]
    (line,) = conftest.build_all(specs)
    assert sorted(map(id, built)) == sorted(map(id, specs)) and line.startswith("2 kernels ready")
    conftest.build_all(specs, "2/2")
    assert built[2:] == specs[1:]


def test_kernels_of_tests_are_those_of_their_module_that_calls_run(monkeypatch) -> None:
    from tests.gpu import conftest

    spec, problem = AttentionSpec(64), DENSE
    module = ModuleType("test_something")
    vars(module).update(KERNELS=[spec], problems=lambda: [problem, problem])

    def item(marker: object) -> SimpleNamespace:
        return SimpleNamespace(module=module, get_closest_marker=lambda name: marker)

    assert conftest.wanted_kernels([item(None), item(None)]) == [spec, problem]
    monkeypatch.setattr(conftest, "has_other_kernels", lambda: True)
    assert conftest.wanted_kernels([item("wgmma")]) == []
