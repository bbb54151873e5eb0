"""Specs and a runner for tests of the commands that ship kernels."""

from __future__ import annotations

from click.testing import CliRunner, Result

from attngen.cli.main import main
from tests.support.cache_kit import ROOT

CURATED = ROOT / "examples" / "specs" / "curated.toml"
GEMMA = ROOT / "examples" / "specs" / "gemma3.toml"
LLAMA = ROOT / "examples" / "specs" / "llama3-8b.toml"


def run(*arguments: object, stdin: str | None = None, **environment: str) -> Result:
    """A command in this process; whatever it raises but an exit code fails the test."""
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, words, input=stdin, env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
