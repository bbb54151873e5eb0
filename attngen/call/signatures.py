"""Signatures and docstrings of functions whose arguments are rows of the table."""

from __future__ import annotations

import inspect
import textwrap

from .argument import Argument
from .table import CARRIERS, Rows, names


def signature(rows: Rows, returns: str) -> inspect.Signature:
    """The signature of a function of these arguments."""
    kinds = {
        **dict.fromkeys(CARRIERS, inspect.Parameter.POSITIONAL_OR_KEYWORD),
        **dict.fromkeys(names("fragments"), inspect.Parameter.VAR_KEYWORD),
    }
    required = ("q", *names("fragments"))
    parameters = [
        inspect.Parameter(
            row.name,
            kind=kinds.get(row.name, inspect.Parameter.KEYWORD_ONLY),
            default=inspect.Parameter.empty if row.name in required else row.default,
            annotation=row.given,
        )
        for row in rows.values()
    ]
    return inspect.Signature(parameters, return_annotation=returns)


def argument_list(rows: Rows, indent: int) -> str:
    """The arguments as a docstring lists them: name, dtype and shapes, meaning, default."""
    lines = []
    for row in rows.values():
        text = f"{row.name}: {_described(row)}{row.doc}"
        if row.default not in (None, False):
            text += f" Default: {row.default}."
        margin = " " * indent
        lines += textwrap.wrap(text, 100, initial_indent=margin, subsequent_indent=f"{margin}    ")
    return "\n".join(lines)


def _described(row: Argument) -> str:
    """A tensor's dtype and shapes for a docstring, as `float32 [h_q] or [b, h_q]. `."""
    if not row.shapes:
        return ""
    shapes = " or ".join(f"[{', '.join(shape)}]" for shape in row.shapes)
    dtype = {"q": "Q's dtype", "int32": "int32 or int64"}.get(row.dtype, row.dtype)
    return f"{dtype}, a broadcast of {shapes}. " if row.is_broadcast else f"{dtype} {shapes}. "
