"""Templates, filled from views: CUDA source, and the structs of fragments in it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ..fragments.features import Fragment
from ..io.files import open_regular
from ..runtime.program import KernelEntry
from .uses import FragmentUse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OPTIONS: dict[str, Any] = {
    "undefined": jinja2.StrictUndefined,
    "block_start_string": "<%",
    "block_end_string": "%>",
    "variable_start_string": "@{",
    "variable_end_string": "}@",
    "comment_start_string": "<#",
    "comment_end_string": "#>",
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
}
_EMPTY_EXPRESSION, _EMPTY_LINES = re.compile(r"^ +\n", re.MULTILINE), re.compile(r"\n{3,}")


@dataclass(frozen=True)
class Source:
    """CUDA C++ of one kernel, and how to launch what it compiles to."""

    text: str
    kernel: KernelEntry

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@cache
def environment(root: Path) -> jinja2.Environment:
    """The template environment: delimiters that do not collide with PTX, strict names."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(root), **_OPTIONS)


def emit_fragment(root: Path, fragment: Fragment) -> str:
    """The struct of one fragment, rendered without any context."""
    known, own = environment(root), fragment.text
    found = known.get_template(fragment.template) if own is None else known.from_string(own)
    module: Any = found.module
    return str(module.emit()).strip()


def emit_fragments(root: Path, uses: dict[str, list[FragmentUse]]) -> tuple[str, ...]:
    """The structs of a kernel's fragments, each once, however many roles it serves."""
    fragments = {use.fragment.struct: use.fragment for group in uses.values() for use in group}
    return tuple(emit_fragment(root, fragment) for fragment in fragments.values())


def fill_view(template: str, view: DataclassInstance, root: Path) -> str:
    """Fill a template with the fields of its view, and with nothing else.

    template: its name under `root`, the templates' directory. view: a frozen dataclass, whose
    fields are what the template and its includes may name; nested ones are reached by attributes.
    Returns: CUDA C++. Lines of spaces alone, which empty expressions leave, are dropped, and empty
    lines in a row are one. Raises: jinja2.UndefinedError where a template names what no field has.
    """
    context = {field.name: getattr(view, field.name) for field in fields(view)}
    text = environment(root).get_template(template).render(context)
    return _EMPTY_LINES.sub("\n\n", _EMPTY_EXPRESSION.sub("", text))


def is_rendered(path: Path) -> bool:
    """Whether a file was rendered from a template of attngen's."""
    with open_regular(path) as file:
        return b"\n// Rendered by attngen from " in file.read(1000)
