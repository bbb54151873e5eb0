"""Every command with files, numbers and words that make no sense: a message, never a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attngen.kernels import tuned
from attngen.spec.attention_spec import AttentionSpec
from tests.support.cache_kit import PROBLEM, ROOT
from tests.support.cli_kit import run

GOOD = "[[kernel]]\nhead_dim = 64\n"
OUTPUT_BYTES = 200_000
# What a field of a spec file may hold, whatever it should.
VALUES = {
    "nan": "nan",
    "infinity": "-inf",
    "negative": "-1",
    "zero": "0",
    "large": "99999999999999999999",
    "digits": "9" * 5000,
    "hexadecimal": f"0x{'f' * 50_000}",
    "date": "2020-01-01",
    "time": "10:00:00",
    "date and time": "2020-01-01T00:00:00Z",
    "boolean": "true",
    "float": "1.5",
    "text": '"nonsense"',
    "nothing": '""',
    "control": '"\\u001b[31m\\n\\u202e"',
    "long": f'"{"x" * 100_000}"',
    "nested": "[[1, 2], [3]]",
    "table": "{ a = 1 }",
    "tables": "[{ a = 1 }, { b = 2 }]",
    "mixed": '[1, "a", true, 2020-01-01, nan, [0xffffffffffffffffffff]]',
    "many": f"[{', '.join(['1'] * 10_001)}]",
}
FIELDS = [field.name for field in dataclasses.fields(AttentionSpec)]
FILES: dict[str, bytes] = {
    "empty": b"",
    "zeros": b"\0" * 99,
    "binary": b"\xff\xfe\x00\x80",
    "archive": b"PK\3\4" + b"\x80" * 99,
    "returns": b"[[kernel]]\rhead_dim = 64\r",
    "surrogate": b'[[kernel]]\nname = "\\ud800"\nhead_dim = 64\n',
    "brackets": b"x = " + b"[" * 100_000,
    "braces": b"x = " + b"{a = " * 50_000,
    "kernel of a table": b"kernel.head_dim = 64\n",
    "kernel of a list": b"kernel = [1, 2]\n",
    "defaults of a list": b"defaults = [1]\n",
    "object": b"{}\n",
    "list": b"[]\n",
    "not a number": b"NaN\n",
    "deep": b"[" * 100_000 + b"\n",
}
NUMBERS = ["nan", "inf", "-inf", "1e400", "-1", "9" * 5000, "x", "", "²", "1/0", "0x10"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a good spec file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "good.toml").write_text(GOOD)
    return tmp_path


def run_safely(*words: object, codes: tuple[int, ...] = (1, 2), **environment: str) -> str:
    """Output of a command, which is short and ends it with one of these exit codes."""
    result = run(*words, **environment)
    assert result.exit_code in codes, result.output[:1000]
    assert len(result.output) < OUTPUT_BYTES and "Traceback" not in result.output
    if result.exit_code:
        assert result.output.strip(), "a refusal says why"
    return result.output


@pytest.mark.parametrize("value", VALUES)
def test_fields_of_spec_files_hold_anything(value: str) -> None:
    for field in FIELDS:
        needed = "" if field == "head_dim" else "head_dim = 64\n"
        Path("odd.toml").write_text(f"[[kernel]]\n{needed}{field} = {VALUES[value]}\n")
        for command in (["list", "--json"], ["explain", "--no-compile"], ["build", "--dry-run"]):
            run_safely(*command, "odd.toml", codes=(0, 1))


@pytest.mark.parametrize("content", FILES)
@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["explain"],
        ["render"],
        ["build"],
        ["bundle", "ls"],
        ["bundle", "verify"],
        ["bundle", "merge", "-o", "merged.attn"],
        ["bundle", "wheel", "--name", "kernels"],
        ["bundle", "verify", "--require"],
        ["bench", "plot", "figure.svg"],
    ],
    ids=" ".join,
)
def test_files_hold_anything(command: list[str], content: str) -> None:
    Path("odd").write_bytes(FILES[content])
    if "plot" in command:
        pytest.importorskip("matplotlib")
        command = ["bench", "plot", "odd", "figure.svg"]
    elif "--require" in command:
        command = ["bundle", "verify", "odd", "--require", "odd"]
    else:
        command = [*command, "odd"]
    run_safely(*command)
    assert not Path("merged.attn").exists() and not Path("figure.svg").exists()


def odd_paths(folder: Path) -> Iterator[Path]:
    (folder / "directory").mkdir()
    (folder / "file").write_bytes(b"")
    yield from (folder / "directory", folder / "none", folder / "file" / "below")
    yield from (Path("/dev/full"), Path(), Path("x" * 5000), Path("a\x1b[31m\nb"), Path("\udc80"))


def test_paths_lead_anywhere(place: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in odd_paths(place):
        for command in (["list"], ["explain"], ["render"], ["build"], ["bundle", "ls"]):
            run_safely(*command, path)
        run_safely("bundle", "verify", path, "--require", path)
        run_safely("bundle", "diff", path, path)
        run_safely("bench", "plot", path, "figure.svg")
        if path != Path("/dev/full"):  # which is read as zeros without an end
            run_safely("build", "--from-trace", path, codes=(1, 2))


def test_output_goes_anywhere(place: Path) -> None:
    for path in odd_paths(place):
        for command in (["render"], ["build", "--dry-run"], ["bundle", "build", "--dry-run"]):
            run_safely(*command, "good.toml", "-o", path, codes=(0, 1, 2))
        run_safely("specs", "llama3", "-o", path, codes=(0, 1, 2))
        run_safely("trace", "-o", path, "--", "true", codes=(0, 1, 2))
        for command in (["ls"], ["ls", "--json"], ["verify"], ["dir"], ["clear"]):
            run_safely("cache", *command, codes=(0, 1), ATTNGEN_CACHE_DIR=str(path))
        variables = ("ATTNGEN_CACHE_DIR", "ATTNGEN_BUNDLES", "ATTNGEN_CHIP")
        run_safely("doctor", "cache", "tuned", codes=(0, 1), **dict.fromkeys(variables, str(path)))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:5])
@pytest.mark.parametrize(
    "command",
    [
        ["cache", "prune", "--max-age-days"],
        ["cache", "prune", "--max-bytes"],
        ["build", "good.toml", "--dry-run", "--jobs"],
        ["build", "good.toml", "--dry-run", "--shard"],
        ["bench", "fwd", "--cases", "none", "--rounds"],
        ["bench", "fwd", "--cases", "none", "--budget-ms"],
        ["tune", "good.toml", "--lengths"],
        ["tune", "good.toml", "--limit"],
        ["tune", "good.toml", "--window"],
    ],
    ids=lambda command: " ".join([*command[:2], command[-1]]),
)
def test_options_take_no_number_that_is_none(command: list[str], number: str) -> None:
    run_safely(*command, number, codes=(2,))


@pytest.mark.parametrize("shard", ["9/8", "0/1", f"1/{'9' * 5000}", f"{'9' * 5000}/1", "١/0"])
def test_shard_that_there_is_not_is_refused(shard: str) -> None:
    run_safely("build", "good.toml", "--dry-run", "--shard", shard, codes=(2,))


def test_command_that_is_not_there_cannot_be_traced() -> None:
    for words in (["./none"], [""], ["."], ["/dev/null"], ["\udc80"]):
        run_safely("trace", "--", *words, codes=(1,))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["forward", "backward", "decode"])
def test_reports_hold_anything(name: str) -> None:
    """A report in which one value at a time is another, or gone."""
    pytest.importorskip("matplotlib")
    report = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    report["rows"] = report["rows"][:2]
    places = [*_places(report)]
    chance = random.Random(name)
    odd: list[Any] = [None, float("nan"), -1, 1e308, "", "$\\bad$", [], {}, {"\x1b": 1.0}]
    for place in chance.sample(places, 6) + [("rows",)]:
        for value in odd:
            changed = json.loads(json.dumps(report))
            holder = changed
            for step in place[:-1]:
                holder = holder[step]
            holder[place[-1]] = value
            Path("report.json").write_text(json.dumps(changed))
            run_safely("bench", "plot", "report.json", "figure.svg", codes=(0, 1))


def test_report_of_more_rows_than_a_figure_has_room_for_is_refused() -> None:
    pytest.importorskip("matplotlib")
    report = json.loads((ROOT / "docs" / "results" / "forward.json").read_text())
    report["rows"] *= 1000
    Path("report.json").write_text(json.dumps(report))
    assert "20000 rows" in run_safely("bench", "plot", "report.json", "figure.png", codes=(1,))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside another."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*path, key))


@pytest.mark.parametrize(
    "change",
    [{"lengths": []}, {"candidates": []}, {"lengths": [7]}, {"ms": -1.0}, {"ms": float("nan")}],
    ids=str,
)
def test_tuned_file_without_times_is_refused(
    change: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "FOLDER", place)
    candidate = tuned.Candidate({}, {"64": change.pop("ms", 1.0)})
    fields = {"lengths": (64,), "candidates": (candidate,), **change}
    entry = tuned.Entry(PROBLEM, "sm_90a", window=0, date="", driver=None, sources={}, **fields)
    tuned.write(place / "nvidia-h200.json", "NVIDIA H200", [entry])
    Path("causal.toml").write_text(GOOD + 'mask = "causal"\n')
    assert "no tuned plans" in run_safely("build", "--dry-run", "causal.toml", codes=(1,))


def test_chip_is_a_name_and_no_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", place / "tuned")
    tuned.write(place / "secret.json", "secret", [])
    for chip in ("../secret", str(place / "secret"), "a\x1b[31m", "\udc80", "x" * 5000):
        said = run_safely("build", "good.toml", "--dry-run", codes=(1,), ATTNGEN_CHIP=chip)
        assert "no plans were tuned for it" in said and "\x1b" not in said


def test_directory_of_the_command_is_gone(place: Path) -> None:
    (place / "gone").mkdir()
    os.chdir(place / "gone")
    (place / "gone").rmdir()
    for words in (["list"], ["list", "good.toml"], ["build", "good.toml"], ["trace", "--", "true"]):
        run_safely(*words, codes=(0, 1))
    os.chdir(place)
