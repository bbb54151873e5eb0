"""Functions of Python that spec files name: `score_mod = "python:mods.py:softcap"`.

Tracing them needs a library of tensors, which specs do without: its front end is found by name, and
only where a file names a function.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


class FunctionError(ValueError):
    """A function of a spec that has no kernels. field: of the spec."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        super().__init__(f"{field}: {reason}")


PREFIX = "python:"
FIELDS = ("score_mod", "mask_mod")
_PACKAGE, *_ = __name__.split(".")
_READER = f"{_PACKAGE}.frontends.pytorch.callables.spec"


def without_functions(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a spec with what its functions stand for in their place. folder: the file's.

    Raises: FunctionError where there is no such function, or kernels cannot do what it does;
    ModuleNotFoundError where torch is not installed.
    """
    found = dict(values)
    for field in FIELDS:
        word = values.get(field)
        if isinstance(word, str) and word.startswith(PREFIX):
            fields_of = import_module(_READER).fields_of
            del found[field]
            try:
                found |= fields_of(field, word.removeprefix(PREFIX), folder, found)
            except ValueError as error:
                raise FunctionError(field, str(error)) from error
    return found
