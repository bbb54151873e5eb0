"""Commands where the compiler, its packages or torch are missing, and how fast they start."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest
from click.testing import Result
from cuda.pathfinder import DynamicLibNotFoundError

import attngen
from attngen.compiler import compile as compiler
from attngen.errors import install_command
from tests.support.paths import ROOT
from tests.unit.cli.test_main import (
    BLOCKED,
    GEMMA,
    LLAMA,
    RUN_MAIN,
    cache_dir,  # noqa: F401  # a cache of each test's own
    run,
    run_python,
)

STARTUP_SECONDS = 0.3


@pytest.mark.parametrize("blocked", ["jinja2", "cuda"])
def test_build_without_the_compile_extra_says_how_to_get_it(blocked: str) -> None:
    code = RUN_MAIN.format(arguments=["build", str(LLAMA)])
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(blocked=(blocked,), code=code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert install_command("compile") in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["build"], ["explain"], ["bundle", "build", "-o", "x.attn"]])
def test_command_without_nvrtc_says_once_how_to_get_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DynamicLibNotFoundError('Failure finding "libnvrtc.so.13"')
    result = run_without_nvrtc(command, error, monkeypatch)
    assert "which is not installed" in result.stderr and "libnvrtc" not in result.stderr


def test_command_with_an_nvrtc_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Failed to dlopen libnvrtc.so.13: invalid ELF header")
    result = run_without_nvrtc(["build"], error, monkeypatch)
    assert "invalid ELF header" in result.stderr and "not installed" not in result.stderr


def test_advice_names_no_package_of_an_index() -> None:
    """There is none of attngen: it is installed from a checkout, or from the file of a wheel."""
    advice = re.compile(r"pip install\b(?! '?\.| torch| dist/| /| -)[^\n]*attngen")
    for path in [
        *(ROOT / "attngen").rglob("*.py"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
    ]:
        assert not advice.findall(path.read_text(encoding="utf-8")), path
    assert advice.search("pip install 'attngen[compile]'") and advice.search("pip install attngen")


def test_advice_of_an_install_names_the_wheel_of_this_version() -> None:
    said = install_command("compile")
    assert "pip install '.[compile]'" in said
    assert f"pip install './attngen-{attngen.__version__}-py3-none-any.whl[compile]'" in said


def run_without_nvrtc(
    command: list[str], error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> Result:
    """A command that compiles, where the bindings' first call ends with this error."""

    def fail() -> None:
        raise error

    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", fail)
    monkeypatch.setattr(compiler, "_nvrtc", compiler._nvrtc.__wrapped__)  # without its memory
    result = run(*command, GEMMA)
    assert result.exit_code == 1
    assert result.stderr.count("NVRTC") == result.stderr.count(install_command("compile")) == 1
    return result


@pytest.mark.slow
def test_build_commands_work_where_torch_cannot_be_imported() -> None:
    code = f"""
from attngen.cli.main import main
from attngen.errors import install_command
for command in (["list"], ["explain", {str(LLAMA)!r}], ["build", {str(LLAMA)!r}], ["cache", "ls"]):
    main(command, standalone_mode=False)
"""
    assert "0 compiled, 2 cached" in run_python(code, ("torch", "numpy", "jax", "cuda.core"))


@pytest.mark.parametrize("command", [["--help"], ["list"], ["list", str(GEMMA)]])
def test_command_start_takes_under_a_third_of_a_second(command: list[str]) -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "attngen", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # CPU time, since a busy machine adds to the wall time only; the least of a few runs, since
    # the first writes bytecode.
    assert min(cpu_seconds() for _ in range(5)) < STARTUP_SECONDS
