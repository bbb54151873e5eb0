"""Text for people: names that cannot act on a terminal, short values, close names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

SHOWN_CHARACTERS = 160
GUESSED_CHARACTERS = 64  # comparing names takes time by the square of their length


def printable(text: str) -> str:
    """The text on one line, escaping what is not printable: control characters, line breaks, marks
    that turn the direction of writing, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(map(_printable_character, text))


def printable_lines(text: str) -> str:
    """The text, escaping what is not printable but for line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(each if each in "\n\t" else _printable_character(each) for each in text)


def shortened(text: str) -> str:
    """The text on one line, cut in the middle where it is long."""
    if len(text) <= SHOWN_CHARACTERS:
        return printable(text)
    half = SHOWN_CHARACTERS // 2
    return f"{printable(text[:half])} … {printable(text[-half:])}"


def quoted(value: Any) -> str:
    """The value's repr, cut in the middle where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a long {type(value).__name__}"
    return shortened(text)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one may be a slip of; None where it is like none of them."""
    if len(name) > GUESSED_CHARACTERS:
        return None
    return next(iter(difflib.get_close_matches(name, [*known], 1)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'causal'?`, or nothing where the name is like no known one."""
    close = closest(name, known)
    return "" if close in (None, name) else f"; did you mean {close!r}?"


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x80:
        return character.encode("unicode_escape").decode()
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # as TOML has them, too
