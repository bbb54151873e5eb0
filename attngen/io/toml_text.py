"""TOML from files that anybody may have written: bounded in bytes and in the depth of keys before
it is parsed, with the line of each key and table."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .files import read_regular

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BYTE_LIMIT = 2 << 20
KEY_LIMIT = 8  # parts of a dotted key: a parser's time and memory grow with the square of them
# In the order of trying: strings over lines and on one, comments, bare words, spaces, the rest.
_TOKEN = re.compile(
    r'(?P<string>"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|(?!""")"(?:[^"\\\n]|\\.)*"'
    r"|(?!''')'[^'\n]*')"
    r"|(?P<comment>\#[^\n]*)"
    r"|(?P<word>[^\s\"'\#=.,\[\]{}]+)"
    r"|(?P<space>[ \t\r]+)"
    r"|(?P<mark>.)",
    re.DOTALL,
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Lines:
    """The line of each key, by its table, which is named by its own key and its number: the second
    `[[kernel]]` is ("kernel", 2), what stands before any table is ("", 1). The table's own line is
    that of the key ""."""

    found: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)

    def of(self, table: str, number: int = 1) -> dict[str, int]:
        """Key → line, of one table; empty where it has none of its own."""
        return self.found.get((table, number), {})


@dataclass(frozen=True)
class Document:
    """A parsed file, and where its keys stand."""

    data: dict[str, Any]
    lines: Lines


def read(path: str | os.PathLike[str], byte_limit: int = BYTE_LIMIT) -> Document:
    """The contents of a file.

    Raises: OSError, also where it is larger; ValueError where it has deeper keys or is no TOML.
    """
    return parse(read_regular(path, byte_limit).decode())


def parse(text: str) -> Document:
    """The contents of a text. Raises: ValueError, as `read`."""
    text = text.replace("\r\n", "\n")
    lines = _find_lines(text)
    try:
        return Document(tomllib.loads(text), lines)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def _find_lines(text: str) -> Lines:
    """The lines of keys, found in one pass. Raises: ValueError where one has too many parts."""
    found: dict[tuple[str, int], dict[str, int]] = {("", 1): {}}
    counts: dict[str, int] = {}
    table = found["", 1]
    for line, tokens in _statements(text):
        is_table = tokens[0] == "["
        brackets = 2 if tokens[:2] == ["[", "["] else 1 if is_table else 0
        key = _part(tokens[brackets]) if len(tokens) > brackets else ""
        if is_table:
            counts[key] = counts.get(key, 0) + 1
            table = found[key, counts[key]] = {"": line}
        else:
            table.setdefault(key, line)
    return Lines(found)


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """The first line and the first tokens of each statement. Ends where a string does not: parsing
    will, too, and looks at nothing behind it. Raises: ValueError, as `_find_lines`."""
    line, depth, dots = 1, 0, 0
    first, tokens = 1, list[str]()
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        if kind == "mark" and token in "\"'":
            break
        dots = _count_dots(dots, kind, token)
        if dots >= KEY_LIMIT:
            raise ValueError(f"a key of more than {KEY_LIMIT} parts (at line {line})")
        if kind == "mark":
            depth += (token in "[{") - (token in "]}")
        if token == "\n" and depth <= 0:
            if tokens:
                yield first, tokens
            depth, tokens = 0, []
        elif kind not in ("space", "comment") and token != "\n":
            first = first if tokens else line
            if len(tokens) < 3:
                tokens.append(token)
        line += token.count("\n")
    if tokens:
        yield first, tokens


def _count_dots(dots: int, kind: str | None, token: str) -> int:
    """Dots between the parts of the key that the token may belong to."""
    if token == ".":
        return dots + 1
    if kind == "word":  # of no key: a number with a fraction, what no parser takes
        return dots if _BARE.fullmatch(token) else 0
    return dots if kind in ("string", "space") else 0


def _part(token: str) -> str:
    """A key as it reads without its quotes."""
    return token[1:-1] if token[:1] in ("'", '"') else token
