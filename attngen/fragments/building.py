"""Building of programs, an operation at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .program import Operation

Number = int | float
_KEPT = (0, 1, -1)  # numbers that are part of a program
_NOTHING = ("f:0.0", "i:0", "l:0")
_NEUTRAL = (("and", "b:1"), ("or", "b:0"))  # operations and first arguments that leave the other


@dataclass
class Operations:
    """Operations so far, each once, and the run-time numbers that they read, with their types."""

    operations: dict[Operation, str] = field(default_factory=dict)
    numbers: list[tuple[str, Number]] = field(default_factory=list)

    def emit(self, name: str, type_: str, *args: str) -> str:
        """The value of an operation."""
        simple = _simplified(name, args)
        if simple is not None:
            return simple
        made = Operation(name, type_, args)
        return self.operations.setdefault(made, f"v{len(self.operations)}")

    def constant(self, value: Number, type_: str, kept: bool = False) -> str:
        """A number of the callable: a literal where it is kept, else one of the call's."""
        if type_ == "b":
            return f"b:{int(bool(value))}"
        value = float(value) if type_ == "f" else int(value)
        if kept or value in _KEPT or not math.isfinite(value):
            return f"{type_}:{value}"
        self.numbers.append((type_, value))
        return f"n{len(self.numbers) - 1}"

    def is_whole(self, value: str) -> bool:
        """Whether a float is an integer that was cast."""
        if not value.startswith("v"):
            return False
        made = list(self.operations)[int(value[1:])]
        return made.name == "cast" and made.type == "f"


def _simplified(name: str, args: Sequence[str]) -> str | None:
    """The value of an operation that changes none of its arguments."""
    first, *_ = args
    *_, last = args
    if name == "neg" and first == "f:1.0":
        return "f:-1.0"
    if name == "mul" and "f:1.0" in args:
        return last if first == "f:1.0" else first
    if (name, first) in _NEUTRAL:
        return last
    if name in ("add", "sub") and last in _NOTHING:
        return first
    if name == "add" and first in _NOTHING:
        return last
    return None
