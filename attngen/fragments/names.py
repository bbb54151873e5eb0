"""Names of a program's values in C++, and the statements that make them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from .cpp_operations import FORMS, SIGNED
from .program import ELEMENTS, POSITIONS, TYPES, Operation, Program
from .program_text import depends_on
from .score_lines import tells_distance

CAPTURED, NUMBER = "captured_", "number_"  # of the names of its fragment's operands
UNIT, PER_UNIT = "score_unit", "score_per_unit"
DIAGONAL = "kDiagonal"  # of places by distances
_REACH = {(): "kTile", ("i",): "kRow", ("j",): "kColumn"}  # of places by i and j
_PLACES = {"b": "ctx.batch", "h": "ctx.head", "i": "at.i", "j": "at.j"}


class Names:
    """The C++ of a program's values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.positive = _never_negative(program)

    def of(self, value: str) -> str:
        """The C++ expression of a value by its name, or of a literal."""
        type_, is_literal, word = value.partition(":")
        if is_literal:
            return literal(type_, word)
        if value in _PLACES:
            return _PLACES[value]
        return NUMBER + value[1:] if value.startswith("n") else value

    def reach(self, load: str) -> str:
        """Which elements of a tile read one number by a load."""
        _, *indices = self.program.operation(load).args
        bound = depends_on(self.program, indices) - {"b", "h"}
        by_distance = all(tells_distance(self.program, each) for each in indices)
        return _REACH.get(tuple(sorted(bound)), DIAGONAL if by_distance else "kAny")

    def lines(self, *values: str, kept: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """The lines that values need, in order. kept: the C++ of floats that hold some of them."""
        operations = self.program.operations
        wanted, found = [*values], set()
        while wanted:
            name = wanted.pop()
            if name.startswith("v") and name not in found:
                found.add(name)
                wanted += () if name in kept else operations[int(name[1:])].args
        return [
            f"const {TYPES[each.type]} v{place} = {self._read(f'v{place}', each, kept)};"
            for place, each in enumerate(operations)
            if f"v{place}" in found
        ]

    def _read(self, value: str, operation: Operation, kept: Mapping[str, str]) -> str:
        """The C++ of a value, or of where it is kept."""
        if value not in kept:
            return self.expression(operation)
        own = kept[value]
        return own if operation.type == "f" else f"__builtin_bit_cast(int, {own})"

    def expression(self, operation: Operation) -> str:
        """The C++ of one operation."""
        if operation.name == "load":
            return self._load(*operation.args)
        given = [self.of(each) for each in operation.args]
        if operation.name == "cast":
            return f"static_cast<{TYPES[operation.type]}>({given[0]})"
        if operation.name in SIGNED:
            return SIGNED[operation.name][operation.type != "f"].format(*given)
        plain = {"fdiv": "{0} / {1}", "mod": "{0} % {1}"}
        if operation.name in plain and self._divides_simply(operation):
            return plain[operation.name].format(*given)
        if operation.type == "b" and operation.name in ("add", "mul"):
            return f"{given[0]} {'||' if operation.name == 'add' else '&&'} {given[1]}"
        return FORMS[operation.name].format(*given)

    def _divides_simply(self, operation: Operation) -> bool:
        """Whether a quotient of ints is what C++ makes it: no sign, and a divisor that is known."""
        number, divisor = operation.args
        _, is_literal, word = divisor.partition(":")
        return bool(is_literal) and int(word) > 0 and number in self.positive

    def index(self, capture: str, axis: int, index: str) -> str:
        """The C++ of an index along an axis of a captured tensor, which lies in it."""
        at, size = self.of(index), f"{CAPTURED}{capture}_size_{axis}"
        name = "min_of" if index in POSITIONS else "index_of"
        return f"{name}({at}, {size}{' - 1' if index in POSITIONS else ''})"

    def _load(self, capture: str, *indices: str) -> str:
        dtype, *_ = self.program.captures[int(capture)]
        name = CAPTURED + capture
        terms = []
        for axis, index in enumerate(indices):
            terms.append(f"{self.index(capture, axis, index)} * {name}_stride_{axis}")
        read = f"read_of<{ELEMENTS[dtype][0]}>({name}, {' + '.join(terms)})"
        return f"{read} != 0" if dtype == "bool" else read


def _never_negative(program: Program) -> frozenset[str]:
    """Integer values that are known to be at least 0."""
    found = set(POSITIONS)
    for place, each in enumerate(program.operations):
        if each.type in ("i", "l") and _keeps_sign(each, found):
            found.add(f"v{place}")
    return frozenset(found)


def _keeps_sign(operation: Operation, positive: set[str]) -> bool:
    def is_positive(arg: str) -> bool:
        type_, is_literal, word = arg.partition(":")
        return arg in positive or bool(is_literal and type_ in ("i", "l") and int(word) >= 0)

    # A product, and what is cast to fewer bits, may be beyond 32 bits, and is negative then.
    each = {"add", "fdiv", "tdiv", "min", "and", "shr"}
    if operation.name in each or (operation.name, operation.type) == ("cast", "l"):
        return all(map(is_positive, operation.args))
    if operation.name == "mod":
        return is_positive(operation.args[1])
    return operation.name == "max" and any(map(is_positive, operation.args))


_SPECIAL: Mapping[str, str] = {
    "inf": "kInfinity",
    "-inf": "(-kInfinity)",
    "nan": "(kInfinity - kInfinity)",
}


def literal(type_: str, word: str) -> str:
    """The C++ of a literal."""
    if type_ == "f":
        return _SPECIAL.get(word, f"{word}f" if not word.startswith("-") else f"({word}f)")
    if type_ == "b":
        return "true" if word == "1" else "false"
    number = f"{word}{'ll' if type_ == 'l' else ''}"
    return f"({number})" if word.startswith("-") else number


def body_of(program: Program, lines: list[str], result: str, hidden: str) -> str:
    """Lines that return a result, and another one where a mask hides the score, which a backward
    then has as -inf, and for rows behind the last."""
    text = "\n    ".join([*lines, *([f"return live ? {result} : {hidden};"] if result else [])])
    score = "0.f" if program.additive else f"live ? score * {UNIT} : 0.f"
    first = ["const bool live = at.is_whole() || (score > -kInfinity && at.i < ctx.q_len);"]
    first += [f"const float s = {score};"] if re.search(r"\bs\b", text) else []
    return "\n    ".join([*first, text])
