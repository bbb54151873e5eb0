"""Output of the attngen command: the one place where text meets a terminal, a pipe or a file.

Names come from files that anybody may have written, and what is at the other end may know few
characters. Whatever is not printable but a line break or a tab is escaped, and so is what the
stream's encoding lacks.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import click

from ..io.text import printable_lines


def show(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text on stdout, or stderr. Raises: OSError where nobody can take it."""
    stream = sys.stderr if err else sys.stdout
    click.echo(fitted(printable_lines(str(text)), stream), err=err, nl=nl)


def show_all(lines: Iterable[str]) -> None:
    """Print the lines as they come."""
    for line in lines:
        show(line)


def fitted(text: str, stream: TextIO | None) -> str:
    """The text, escaping what the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def prepare() -> None:
    """Have the standard streams escape what they cannot write, in click's own messages too."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class PrintableFormatter(logging.Formatter):
    """Log lines without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class FiniteFloat(click.FloatRange):
    """A number in a range, of which neither NaN nor infinity is one."""

    name = "finite float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


class CommandError(click.ClickException):
    """A message on stderr, and exit code 1."""

    def show(self, file: Any = None) -> None:
        show(f"Error: {self.message}", err=True)
