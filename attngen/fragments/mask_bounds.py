"""Bounds of masks: the C++ that finds, for spans of queries and keys, whether all of their pairs
take part or none does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .names import Names
from .program import TYPES, Operation, Program
from .program_text import depends_on

_OF_BOOLS = frozenset({"and", "or", "xor", "not", "where", "eq", "ne"})
_OF_INTEGERS = frozenset({
    *("add", "sub", "mul", "neg", "abs", "min", "max", "fdiv", "tdiv", "mod", "shr"),
    *("lt", "le", "gt", "ge", "eq", "ne", "where"),
})  # fmt: skip
_OF_FLOATS = frozenset({
    *("add", "sub", "mul", "neg", "abs", "min", "max", "floor", "ceil"),
    *("lt", "le", "gt", "ge", "eq", "ne", "where"),
})  # fmt: skip
_KNOWN = {"b": _OF_BOOLS, "i": _OF_INTEGERS, "l": _OF_INTEGERS, "f": _OF_FLOATS}
_SIDES = {frozenset("i"): "i", frozenset("j"): "j"}
_VALUES = re.compile(r"\bw(\d+)\b")  # that an expression names
_LOGIC = {"add": "or", "mul": "and"}  # of bools


def bounds_struct_of(program: Program, names: Names) -> str:
    """Members of a mask's struct: `bound`, and a function for each load that it takes the least and
    the largest number of."""
    bounds = _Bounds(program, names)
    lines = bounds.lines()
    text = "\n    ".join([*lines, f"return {bounds.of(program.value)};"])
    reads = "".join(map(bounds.read, bounds.spread))
    return f"""{reads}
  // Whether all pairs of spans of queries and keys take part, and whether some do, as far as bounds
  // of values tell. spread(span, read): the least and the largest that `read` returns over a span.
  template <class Spread>
  ATTNGEN_HD Bounds<bool> bound(const Context& ctx, Bounds<int> i, Bounds<int> j,
                                Spread spread) const {{
    {text}
  }}"""


class _Bounds:
    """The C++ of bounds of a program's values."""

    def __init__(self, program: Program, names: Names) -> None:
        self.program, self.names = program, names
        self.spread: list[int] = []  # loads along one side, by their places

    def of(self, value: str) -> str:
        """The C++ expression of a value's bounds."""
        if value in ("i", "j"):
            return value
        if value.startswith("v"):
            return f"w{value[1:]}"
        type_ = self.type_of(value)
        return f"exactly<{TYPES[type_]}>({self.names.of(value)})"

    def type_of(self, value: str) -> str:
        """The type of a value."""
        type_, is_literal, _ = value.partition(":")
        if is_literal:
            return type_
        if value.startswith("v"):
            return self.program.operation(value).type
        return self.program.numbers[int(value[1:])] if value.startswith("n") else "i"

    def lines(self) -> Iterator[str]:
        """The lines that the mask's value needs, in order."""
        wanted, found = [*_VALUES.findall(self.of(self.program.value))], dict[int, str]()
        while wanted:
            place = int(wanted.pop())
            if place not in found:
                found[place] = self._expression(place, self.program.operations[place])
                wanted += _VALUES.findall(found[place])
        for place in sorted(found):
            type_ = TYPES[self.program.operations[place].type]
            yield f"const Bounds<{type_}> w{place} = {found[place]};"

    def _expression(self, place: int, operation: Operation) -> str:
        whole = f"anything<{TYPES[operation.type]}>()"
        if operation.name == "load":
            _, *indices = operation.args
            found = depends_on(self.program, indices) - {"b", "h"}
            side = _SIDES.get(found)
            if side is None and found:
                return whole
            self.spread.append(place)
            read = f"[&](int at) {{ return read_{place}(ctx, at); }}"
            return f"spread({side}, {read})" if side else f"exactly(read_{place}(ctx, 0))"
        given = [*map(self.of, operation.args)]
        of = {self.type_of(each) for each in operation.args}
        if operation.name == "cast":
            (only,), (source,) = given, of
            if source == operation.type:
                return only
            name = f"bound_cast<{TYPES[operation.type]}>" if operation.type != "b" else "truth_of"
            return f"{name}({only})"
        if operation.name == "where":
            of = {self.type_of(each) for each in operation.args[1:]}
        name = _LOGIC.get(operation.name, operation.name) if of == {"b"} else operation.name
        if len(of) != 1 or name not in _KNOWN[next(iter(of))]:
            return whole
        return f"bound_{name}({', '.join(given)})"

    def read(self, place: int) -> str:
        """The function that reads what a load does, at a query or a key."""
        value = f"v{place}"
        operation = self.program.operation(value)
        lines = self.names.lines(value)
        if any("at." in each for each in lines):
            lines = ["const struct { int i, j; } at = {where, where};", *lines]
        text = "\n    ".join(lines)
        return f"""
  ATTNGEN_HD {TYPES[operation.type]} read_{place}(const Context& ctx, int where) const {{
    {text}
    return {value};
  }}"""
