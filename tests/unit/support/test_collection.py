"""The options of tests/conftest.py that leave tests out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = """
import pytest
@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", range(8))
def test_sampled(n): pass
@pytest.mark.parametrize("n", range(3))
def test_every(n): pass
@pytest.mark.parametrize("n", range(36))
def test_many(n): pass
@pytest.mark.slow
def test_slow(): pass
"""
EVERY = [f"test_every[{n}]" for n in range(3)]
MANY = [f"test_many[{n}]" for n in range(36)]
SAMPLED = [f"test_sampled[{n}]" for n in range(8)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ([], [*SAMPLED, *EVERY, *MANY, "test_slow"]),
        (["--quick"], ["test_sampled[2]", "test_sampled[6]", *EVERY, *MANY[6::12]]),
        (["--each", "1"], ["test_sampled[4]", "test_every[1]", "test_many[18]", "test_slow"]),
        (["--quick", "--each", "1"], ["test_sampled[6]", "test_every[1]", "test_many[18]"]),
    ],
)
def test_options_keep_evenly_spread_sets(
    options: list[str], kept: list[str], tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert [line.partition("::")[2] for line in found] == kept, done.stdout + done.stderr
