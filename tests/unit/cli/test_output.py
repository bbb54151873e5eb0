"""Output of the command: names that cannot act on a terminal, any encoding, closed pipes."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from attngen.cli import doctor
from attngen.cli.main import main
from attngen.cli.output import PrintableFormatter, fitted
from attngen.compiler.cache import Cache, CacheEntryInfo
from attngen.io.text import printable, printable_lines, quoted
from tests.support.bundle_kit import make_program, write
from tests.support.cache_kit import ROOT
from tests.support.cli_kit import run

# A colour, a window's title, a line of its own, text from right to left, half of a character.
NASTY = "a\x1b[31mRED\x1b]0;title\x07\nError: forged\x9b0m\u202eb\u2028c\x7f"
UNSAFE = {*"\x1b\x07\x9b\u202e\u2028\x7f\udc80"}
ENCODINGS = ("ascii", "iso-8859-1", "iso-8859-15", "cp1252", "euc-jp", "utf-16")
SPEC = '[[kernel]]\nname = "naïve → 𝛂"\nhead_dim = 64\n'


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec file of two kernels with nasty names, the second of which is refused."""
    named = f'[[kernel]]\nname = {json.dumps(NASTY)}\nhead_dim = 16\nmask = "causal"\n'
    text = named.replace("\x7f", "\\u007f")
    path = tmp_path / "specs.toml"
    path.write_text(text + text.replace("causal", "\\u001b[31m").replace("RED", "BLUE"))
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle as a stranger may have crafted it: sound, and with nasty names where any will do."""
    return write_nasty(tmp_path / "nasty.attn")


def write_nasty(path: Path, **changes: str) -> Path:
    made = make_program(title=NASTY, toolchain=NASTY, **changes)
    problem = dataclasses.replace(made.problem, masks=(NASTY,))
    kernels = tuple(
        dataclasses.replace(each, binary=dataclasses.replace(each.binary, problem=problem))
        for each in made.kernels
    )
    arch = made.kernels[0].binary.arch
    return write(path, dataclasses.replace(made, problem=problem, arch=arch, kernels=kernels))


def assert_safe(text: str, *, forged: bool = True) -> None:
    assert not UNSAFE & {*text}, ascii(text)
    if forged:
        assert not [line for line in text.splitlines() if line.startswith("Error: forged")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["list", "--json"],
        ["explain", "--no-compile"],
        ["render"],
        ["build"],
        ["build", "--dry-run"],
        ["build", "--arch", NASTY],
        ["explain", "--name", NASTY + "?"],
        ["bundle", "build", "-o", "x.attn"],
    ],
    ids=" ".join,
)
def test_names_of_a_spec_file_are_printed_escaped(
    command: list[str], spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*command, spec)
    assert_safe(result.stdout + result.stderr)
    assert r"\x1b[31m" in result.output or r"\u001b[31m" in result.output or "render" in command


@pytest.mark.parametrize("command", ["ls", "verify", "diff"])
def test_names_of_a_bundle_are_printed_escaped(command: str, bundle: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.attn", make_program())
    result = run("bundle", command, bundle, *([other] if command == "diff" else []))
    assert_safe(result.stdout + result.stderr)
    assert command == "verify" or r"\x1b[31mRED" in result.stdout


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_names_in_refusals_of_a_bundle_are_printed_escaped(command: str, tmp_path: Path) -> None:
    result = run("bundle", command, write_nasty(tmp_path / "nasty.attn", arch=NASTY))
    assert result.exit_code == 1 and not result.stdout
    assert "is no architecture" in result.stderr and r"\x1b[31mRED" in result.stderr
    assert_safe(result.stderr)


def test_names_of_files_are_printed_escaped(tmp_path: Path, bundle: Path) -> None:
    for name in (f"{NASTY.replace('/', '')}.toml", "\udc80.toml"):
        path = tmp_path / name
        path.write_text("[[kernel]]\nhead_dims = 1\n")
        for command in (["list"], ["build", "--from-trace"], ["bundle", "verify"], ["trace", "-o"]):
            result = run(*command, path, *(["--", "true"] if command[0] == "trace" else []))
            assert result.exit_code == 1
            assert_safe(result.stderr)
    (tmp_path / f"{NASTY}.attn").write_bytes(bundle.read_bytes())
    assert_safe(run("bundle", "verify", tmp_path / f"{NASTY}.attn").output)


@pytest.mark.parametrize(
    "words",
    [
        [NASTY],
        ["list", f"--{NASTY}"],
        ["specs", NASTY],
        ["doctor", NASTY],
        ["build", "--shard", NASTY],
    ],
    ids=lambda words: words[0][:6],
)
def test_words_of_the_command_line_are_printed_escaped(words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code in (1, 2)
    assert_safe(result.stderr, forged=False)


def test_names_of_cache_entries_are_printed_escaped(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = CacheEntryInfo("0" * 64, NASTY, NASTY, NASTY, 1, float("inf"), cache_dir / NASTY)
    monkeypatch.setattr(Cache, "entries", lambda _: [entry])
    shown = run("cache", "ls")
    assert_safe(shown.stdout)
    assert len(shown.stdout.splitlines()) == 1
    (line,) = run("cache", "ls", "--json").stdout.splitlines()
    assert json.loads(line)["label"] == NASTY and json.loads(line)["created"] is None


def test_doctor_prints_findings_on_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"jit": lambda: NASTY})
    (line,) = run("doctor").stdout.splitlines()
    assert_safe(line)


def test_log_lines_are_escaped() -> None:
    record = logging.LogRecord("attngen", logging.WARNING, "", 0, "%s: hidden", (NASTY,), None)
    assert_safe(PrintableFormatter("%(message)s").format(record), forged=False)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    "command",
    [
        ["list"],
        ["list", "SPEC"],
        ["explain", "--no-compile", "SPEC"],
        ["render", "SPEC"],
        ["build", "--dry-run", "SPEC"],
        ["specs", "gemma3"],
        ["doctor", "python", "headers", "jit"],
        ["doctor", "\u2192"],
        ["n\u00f6"],
        ["trace", "-o", "n\u00e4ive.jsonl", "--", "true"],
        ["bench", "fwd", "--help"],
    ],
    ids=" ".join,
)
def test_output_in_any_encoding(encoding: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SPEC, encoding="utf-8")
    words = ["s.toml" if word == "SPEC" else word for word in command]
    done = start(words, tmp_path, PYTHONIOENCODING=encoding)
    out, err = (text.decode(encoding) for text in done)
    assert "Traceback" not in err and (out or err)


def start(words: list[str], folder: Path, **environment: str) -> tuple[bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "attngen", *words],
        capture_output=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("command", ["list", "--help", "specs gemma3", "doctor jit"])
@pytest.mark.parametrize("end", [">&-", ">&- 2>&-", "<&-", ">/dev/full", "| true", "2>&1 | true"])
def test_output_that_nobody_takes_ends_without_a_traceback(command: str, end: str) -> None:
    line = f"{sys.executable} -m attngen {command} {end}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True,
                          cwd=ROOT)  # fmt: skip
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if end == ">/dev/full":
        assert done.returncode == 1 and "No space left on device" in done.stderr


def test_trace_from_a_closed_standard_input_is_refused() -> None:
    line = f"{sys.executable} -m attngen build --from-trace - <&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "Error: -: standard input is closed\n")


@pytest.mark.parametrize("command", ["list", "specs gemma3", "render examples/specs/gemma3.toml"])
def test_files_are_read_and_written_as_utf_8_in_any_locale(command: str, tmp_path: Path) -> None:
    options = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    more = ["-o", str(tmp_path / "out")] if command != "list" else []
    done = subprocess.run([sys.executable, *options, "-m", "attngen", *command.split(), *more],
                          capture_output=True, text=True, cwd=ROOT)  # fmt: skip
    assert done.returncode == 0, done.stderr


def commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*names, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)


def test_help_of_every_command_is_ascii() -> None:
    found = dict(commands(main))
    assert len(found) > 20
    for names in found:
        assert run(*names, "--help").stdout.isascii(), names


def test_commands_print_in_one_place_alone() -> None:
    for path in (ROOT / "attngen").glob("cli*.py"):
        if path.name == "cli/output.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("click.echo", "print", "click.secho"), f"{path}: {node}"


def test_printable_keeps_what_is_and_escapes_the_rest() -> None:
    assert printable("naïve → 𝛂 𝕏, two words") == "naïve → 𝛂 𝕏, two words"
    assert printable("a\nb\t\x1b\x85\u202e\udc80\U000e0001") == (
        r"a\nb\t\x1b\u0085\u202e\udc80\U000e0001"
    )
    assert printable_lines("a\nb\t\x1b\r") == "a\nb\t\\x1b\\r"
    for code in range(sys.maxunicode + 1):
        assert printable(chr(code)).isprintable()


def test_quoted_is_short_whatever_the_value() -> None:
    for value in ("x" * 9999, [1] * 9999, 10**4299, 1 << 99_999, {"a": "\x1b" * 999}):
        assert len(quoted(value)) < 300 and quoted(value).isprintable()


def test_fitted_text_is_what_the_stream_can_write() -> None:
    class Stream:
        encoding = "ascii"

    assert fitted("a → b", Stream()) == r"a \u2192 b"  # type: ignore[arg-type]
    assert fitted("a → b", None) == "a → b"
