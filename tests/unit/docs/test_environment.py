"""docs/guide/environment.md: its table has every variable that the code reads; completion works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attngen.compiler.cache import Cache
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "environment.md").read_text()
OTHERS = {"XDG_CACHE_HOME"}  # read, and not attngen's own


def variables_of_the_code() -> set[str]:
    """Each string that is a variable's name, wherever it is read or set."""
    found = set()
    for path in (ROOT / "attngen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {*re.findall(r"\A_?ATTNGEN_[A-Z0-9_]+\Z", node.value)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get":
                found |= {x.value for x in node.args[:1] if isinstance(x, ast.Constant)}
    return found


def test_table_has_every_variable_that_the_code_reads() -> None:
    rows = {*re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)}
    assert rows == variables_of_the_code() - OTHERS
    assert len(rows) >= 7 and all(f"`{name}`" in PAGE for name in OTHERS)


def test_readme_says_where_the_cache_is_and_where_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`~/.cache/attngen`" in readme and "ATTNGEN_CACHE_DIR=" in readme
    assert "(docs/guide/environment.md)" in readme


def test_cache_is_where_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNGEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.default().root == tmp_path / ".cache" / "attngen"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache.default().root == tmp_path / "xdg" / "attngen"
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "mine"))
    assert Cache.default().root == tmp_path / "mine"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_made_as_the_page_says(shell: str) -> None:
    (line,) = re.findall(rf"^\| {shell}.* \| `(.*)` \|$", PAGE, re.MULTILINE)
    name, value = re.search(r"(_ATTNGEN_COMPLETE)=(\w+)", line).groups()
    code = "from attngen.cli.main import main; main(prog_name='attngen')"
    for instruction, word in ((value, name), (f"{shell}_complete", "cache")):
        words = {"COMP_WORDS": "attngen cach", "COMP_CWORD": "cach" if shell == "fish" else "1"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **words, name: instruction},
        )
        if shell == "bash" and "Shell completion is not supported" in done.stderr:
            pytest.skip("bash is too old")
        assert word in done.stdout, done.stderr
