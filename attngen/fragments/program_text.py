"""Texts of programs: read back, and said in short.

A text comes from traces and bundles, and becomes C++: every word of it is one that programs have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .cpp_operations import FORMS, SIGNED
from .program import ELEMENTS, ONE, POSITIONS, TYPES, Operation, Program

_NAMES = frozenset((*FORMS, *SIGNED, "load", "cast"))
# How many arguments each takes; of a load that depends on the tensor.
_COUNTS = {name: len({*re.findall(r"\{\d\}", form)}) for name, form in FORMS.items()}
_COUNTS |= dict.fromkeys((*SIGNED, "cast"), 1)
_NOTHING = "f:0.0"
_LITERALS = {
    "f": re.compile(r"-?([0-9]+\.[0-9]+(e[+-][0-9]+)?|[0-9]+e[+-][0-9]+|inf)|nan"),
    "i": re.compile(r"-?[0-9]{1,20}"),
    "l": re.compile(r"-?[0-9]{1,20}"),
    "b": re.compile(r"[01]"),
}
_MOST_RANK, _MOST_LINES = 8, 4096
# Operations that take the time of several others: those of the special-function unit.
_SPECIAL = frozenset(
    "exp exp2 log log2 log1p expm1 sin cos tanh sigmoid sqrt rsqrt erf pow recip div ratio".split()
)
_SLOPES = {ONE: "1", _NOTHING: "0"}


def is_program(text: str) -> bool:
    """Whether this is the text of a program, and no digest of another fragment's."""
    return "\n" in text


def parse_program(text: str) -> Program:
    """The program of a text. Raises: ValueError where it is none, with its first mistake."""
    captures: list[tuple[str, int, str]] = []
    numbers: list[str] = []
    operations: list[Operation] = []
    ends: dict[str, str] = {}
    learned: list[tuple[str, str]] = []
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        raise ValueError(f"more than {_MOST_LINES} lines")
    for number, line in enumerate(lines, 1):
        name, *words = line.split(" ")
        try:
            if name == "capture":
                dtype, rank, type_ = words
                _require(dtype in ELEMENTS and type_ in ("i", "l") and rank.isdecimal())
                _require(1 <= int(rank) <= _MOST_RANK)
                captures.append((dtype, int(rank), type_))
            elif name == "number":
                (type_,) = words
                _require(type_ in ("f", "i", "l"))
                numbers.append(type_)
            elif name in ("value", "slope"):
                (ends[name],) = words
            elif name == "learned":
                load, derivative = words
                learned.append((load, derivative))
            else:
                type_, *args = words
                _require(name in _NAMES and type_ in TYPES and bool(args))
                made = Operation(name, type_, tuple(args))
                _check(made, captures, len(numbers), len(operations))
                operations.append(made)
        except ValueError as error:
            raise ValueError(f"line {number} is of no program") from error
    program = Program(
        tuple(captures), tuple(numbers), tuple(operations), ends.get("value", ""),
        ends.get("slope", ""), tuple(learned),
    )  # fmt: skip
    results = [program.value, program.slope, *(each for pair in learned for each in pair)]
    known = [_is_value(each, len(numbers), len(operations)) for each in results]
    loads = [load.startswith("v") for load, _ in learned]
    if not all((*known, *loads)) or program.text != text:
        raise ValueError("its ends are of no program")
    if any(program.operation(load).name != "load" for load, _ in learned):
        raise ValueError("it learns what it does not read")
    return program


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _check(
    made: Operation, captures: list[tuple[str, int, str]], numbers: int, operations: int
) -> None:
    """Raises: ValueError where an operation has words that none has, or what comes behind it."""
    values = made.args
    if made.name == "load":
        capture, *indices = made.args
        _require(capture.isdecimal() and int(capture) < len(captures))
        _, rank, _ = captures[int(capture)]
        _require(len(indices) == rank)
        values = tuple(indices)
    else:
        _require(len(values) == _COUNTS[made.name])
    _require(all(_is_value(each, numbers, operations) for each in values))


def _is_value(word: str, numbers: int, operations: int) -> bool:
    kind, is_literal, rest = word.partition(":")
    if is_literal:
        return kind in _LITERALS and bool(_LITERALS[kind].fullmatch(rest))
    if word in ("s", *POSITIONS):
        return True
    most = {"n": numbers, "v": operations}.get(word[:1], 0)
    return bool(re.fullmatch(r"[nv](0|[1-9][0-9]{0,5})", word)) and int(word[1:]) < most


def programs_in(texts: Iterable[str]) -> list[Program]:
    """The programs among texts and digests of fragments. Raises: ValueError as `parse_program`."""
    return [parse_program(each) for each in texts if is_program(each)]


def facts_of(program: Program) -> Iterator[str]:
    """Lines that say a program in short: what it costs, its slope, what it reads and learns."""
    special = sum(each.name in _SPECIAL for each in program.operations)
    slope = _SLOPES.get(program.slope, "real")
    yield (
        f"program {program.name}: {len(program.operations)} operations, {special} of them special "
        f"functions; slope {slope}; numbers of the call: {len(program.numbers)}"
    )
    learned = {load for load, _ in program.learned}
    for place, each in enumerate(program.operations):
        if each.name == "load":
            capture, *indices = each.args
            dtype, _, _ = program.captures[int(capture)]
            where = ", ".join(sorted(depends_on(program, indices))) or "no position"
            ends = ", with its gradient" if f"v{place}" in learned else ""
            yield f"reads captured_{capture}, {dtype}, by {where}{ends}"


def reached_from(program: Program, value: str) -> frozenset[str]:
    """The values that a value is made of, itself among them."""
    wanted, seen = [value], set()
    while wanted:
        each = wanted.pop()
        if each not in seen:
            seen.add(each)
            wanted += program.operation(each).args if each.startswith("v") else ()
    return frozenset(seen)


def depends_on(program: Program, values: Iterable[str]) -> frozenset[str]:
    """Find on which of s, b, h, i and j values of a program depend."""
    wanted, seen = [*values], set()
    found: set[str] = set()
    while wanted:
        value = wanted.pop()
        if value in ("s", *POSITIONS):
            found.add(value)
        elif value.startswith("v") and value not in seen:
            seen.add(value)
            wanted += program.operation(value).args
    return frozenset(found)
