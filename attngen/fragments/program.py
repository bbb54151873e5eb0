"""Programs: functions of a score and its place, as a list of typed operations.

A program is what a callable of Python was traced to. It knows neither the callable's text nor its
numbers nor the tensors that it reads: two callables that compute the same way are one program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

PREFIX = "traced_"  # of the names of fragments that come from programs
LEARNED_PREFIX = f"{PREFIX}learned_"  # of those with derivatives by captured tensors
MASK_PREFIX = f"{PREFIX}mask_"  # of those that say which pairs take part
# Type of a value → its C++ type: float32, integers of 32 and of 64 bits, booleans.
TYPES = {"f": "float", "i": "int", "l": "long long", "b": "bool"}
# Dtype of a captured tensor, as torch calls it → the C++ type of an element, the type of its value.
ELEMENTS = {
    "float32": ("float", "f"),
    "int64": ("long long", "l"),
    "int32": ("int", "i"),
    "uint8": ("unsigned char", "i"),
    "bool": ("unsigned char", "b"),
}
POSITIONS = ("b", "h", "i", "j")
ONE = "f:1.0"  # the slope of what is only added
_DIGEST_CHARACTERS = 12  # hex: 48 bits


def has_program(scores: Iterable[str]) -> bool:
    """Whether one of the scores of these names comes from a program."""
    return any(name.startswith(PREFIX) for name in scores)


def learns(scores: Iterable[str]) -> bool:
    """Whether one of the scores of these names has derivatives by captured tensors."""
    return any(name.startswith(LEARNED_PREFIX) for name in scores)


@dataclass(frozen=True)
class Operation:
    """One value: what makes it of others, and its type, a key of `TYPES`.

    args: names of values, `s`, `b`, `h`, `i` and `j` of the score and its place, `n0` … of numbers,
    `v0` … of earlier operations by their places; or a literal, `f:0.5`, behind its type. Of `load`
    the number of a captured tensor, then an index for each of its axes.
    """

    name: str
    type: str
    args: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((self.name, self.type, *self.args))


@dataclass(frozen=True)
class Program:
    """A score that replaces another one, and the derivative of the one by the other; or whether a
    pair takes part.

    captures: of each tensor that it reads the dtype, the number of axes, and the type of its
    strides, `l` where places are beyond 32 bits; numbers: types of its run-time numbers;
    value, slope: values as `Operation` names them, float32, that of a mask a bool. learned: loads
    of captured tensors that have gradients, each with the derivative of the score by what it reads.
    """

    captures: tuple[tuple[str, int, str], ...]
    numbers: tuple[str, ...]
    operations: tuple[Operation, ...]
    value: str
    slope: str
    learned: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The canonical text, an operation a line; equal programs have equal texts."""
        heads = [f"capture {dtype} {rank} {type_}" for dtype, rank, type_ in self.captures]
        heads += [f"number {type_}" for type_ in self.numbers]
        lines = [each.text for each in self.operations]
        ends = [f"value {self.value}", f"slope {self.slope}"]
        ends += [f"learned {load} {derivative}" for load, derivative in self.learned]
        return "\n".join([*heads, *lines, *ends])

    @cached_property
    def name(self) -> str:
        """The name of its fragment, which no other program has."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        prefix = MASK_PREFIX if self.is_mask else LEARNED_PREFIX if self.learned else PREFIX
        return prefix + digest[:_DIGEST_CHARACTERS]

    @property
    def is_mask(self) -> bool:
        """Whether its value says whether a pair takes part, instead of a score."""
        if self.value.startswith("v"):
            return self.operation(self.value).type == "b"
        return self.value.startswith("b:")

    @cached_property
    def learned_captures(self) -> tuple[int, ...]:
        """The captured tensors, by their numbers, that have gradients."""
        loads = (self.operation(load) for load, _ in self.learned)
        return tuple(sorted({int(each.args[0]) for each in loads}))

    def operation(self, value: str) -> Operation:
        """The operation that makes a value."""
        return self.operations[int(value.removeprefix("v"))]

    @property
    def additive(self) -> bool:
        """Whether it only adds to scores what does not depend on them."""
        if self.slope != ONE:
            return False
        bound: set[str] = {"s"}
        for place, each in enumerate(self.operations):
            if bound.intersection(each.args):
                bound.add(f"v{place}")
        name = self.value
        while name.startswith("v"):
            last = self.operations[int(name[1:])]
            ways = [arg for arg in last.args if arg in bound]
            added = last.name == "add" or (last.name == "sub" and last.args[0] in bound)
            if not added or len(ways) != 1:
                return False
            name, *_ = ways
        return name == "s"
