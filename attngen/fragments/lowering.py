"""Lowering: a program as the C++ of a score fragment.

No line calls a library function with a slow path: beside a division by IEEE's rules, or a sine of a
large argument, the compiler makes the products of matrices wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from .cpp_operations import FORMS, HELPERS, NEEDS, SIGNED
from .header import Fragment, Operand
from .program import ELEMENTS, POSITIONS, TYPES, Operation, Program
from .program_text import depends_on

CAPTURED, NUMBER = "captured_", "number_"  # of the names of its fragment's operands
UNIT, PER_UNIT = "score_unit", "score_per_unit"
NUMBER_DTYPES = {"f": "f32", "i": "i32", "l": "i64"}
_REACH = {(): "kTile", ("i",): "kRow", ("j",): "kColumn"}  # of places by i and j
_PLACES = {"b": "ctx.batch", "h": "ctx.head", "i": "at.i", "j": "at.j"}


@cache
def fragment_of(program: Program) -> Fragment:
    """The score fragment of a program, whose text is rendered with it.

    Its operands are what calls pass: tensors `captured_0` …, numbers `number_0` …, and the number 1
    as `score_unit` and `score_per_unit`, by which kernels say the unit of their scores.
    """
    operands = [
        *operands_of(program),
        Operand(UNIT, "scalar", "f32", "1.", score_power=-1),
        Operand(PER_UNIT, "scalar", "f32", "1.", score_power=1),
    ]
    struct = name_of_struct(program)
    return Fragment(
        axis="score",
        name=program.name,
        doc="A traced score_mod.",
        struct=struct,
        bounds=(),
        selected_by="score",
        operands=tuple(operands),
        additive=program.additive,
        learned=program.learned_captures,
        reaches=tuple(Names(program).reach(load) for load, _ in program.learned),
        text=f"<% macro emit() %>\n{struct_of(program, struct)}\n<% endmacro %>\n",
        program=program.text,
    )


def operands_of(program: Program) -> Iterator[Operand]:
    """The tensors and numbers that calls pass for a program, in the order of `members_of`."""
    for place, (dtype, rank, type_) in enumerate(program.captures):
        yield Operand(
            f"{CAPTURED}{place}", "captured", NUMBER_DTYPES[type_], "A captured tensor.",
            rank=rank, element=dtype,
        )  # fmt: skip
    for place, type_ in enumerate(program.numbers):
        yield Operand(
            f"{NUMBER}{place}", "scalar", NUMBER_DTYPES[type_], "A number of the callable."
        )


def name_of_struct(program: Program) -> str:
    """The C++ name of a program's struct."""
    return "".join(word.capitalize() for word in program.name.split("_"))


def struct_of(program: Program, struct: str) -> str:
    """The C++ of a program: a struct of that name, with `apply` and `grad`."""
    names = Names(program)
    applied, slope = names.lines(program.value), names.lines(program.slope)
    result = f"{names.of(program.value)} * {PER_UNIT}"
    result = f"score + {result}" if program.additive else result
    units = (f"float {UNIT};", f"float {PER_UNIT};")
    members = "\n  ".join((*members_of(program), *units))
    learned = _learn(program, names) if program.learned else ""
    helpers = "\n  ".join(helpers_of("\n".join([*applied, *slope, learned])))
    return f"""struct {struct} {{
  {members}

  {helpers}
  template <class At>
  ATTNGEN_HD float apply(const Context& ctx, float score, At at) const {{
    {_body(program, applied, result, "score")}
  }}
  // d applied / d score.
  template <class At>
  ATTNGEN_HD float grad(const Context& ctx, float score, float, At at) const {{
    {_body(program, slope, names.of(program.slope), "0.f")}
  }}{learned}
}};"""


def _learn(program: Program, names: Names) -> str:
    """The C++ of a program's member that adds to gradients of captured tensors, which lie in the
    sums behind each other in the order of the tensors."""
    lines = names.lines(*[value for pair in program.learned for value in pair])
    base: list[str] = []
    starts: dict[str, str] = {}
    for number in program.learned_captures:
        starts[str(number)] = "".join(f"{each} + " for each in base)
        _, rank, _ = program.captures[number]
        base.append(" * ".join(["1ll", *(f"{CAPTURED}{number}_size_{n}" for n in range(rank))]))
    for number, (load, derivative) in enumerate(program.learned):
        capture, *indices = program.operation(load).args
        place = "0ll"
        for axis, index in enumerate(indices):
            at = names.index(capture, axis, index)
            size = f"static_cast<long long>({CAPTURED}{capture}_size_{axis})"
            place = f"({place}) * {size} + {at}" if axis else at
        lines.append(
            f"sums.template add<{number}, Sums::{names.reach(load)}>({starts[capture]}{place}, "
            f"live ? gradient * {names.of(derivative)} : 0.f);"
        )
    return f"""
  // Adds the derivatives by captured numbers, times that of the result.
  template <class At, class Sums>
  ATTNGEN_HD void learn(const Context& ctx, float score, float gradient, At at, Sums& sums) const {{
    {_body(program, lines, "", "")}
  }}"""


def members_of(program: Program) -> Iterator[str]:
    """Members of a program's struct: its captured tensors and its numbers."""
    for place, (_, rank, type_) in enumerate(program.captures):
        yield f"const void* {CAPTURED}{place};"
        for axis in range(rank):
            yield f"{TYPES[type_]} {CAPTURED}{place}_stride_{axis};"
            yield f"int {CAPTURED}{place}_size_{axis};"
    yield from (f"{TYPES[type_]} {NUMBER}{n};" for n, type_ in enumerate(program.numbers))


def _body(program: Program, lines: list[str], result: str, hidden: str) -> str:
    """Lines that return a result, and another one where a mask hides the score, which a backward
    then has as -inf, and for rows behind the last."""
    text = "\n    ".join([*lines, *([f"return live ? {result} : {hidden};"] if result else [])])
    score = "0.f" if program.additive else f"live ? score * {UNIT} : 0.f"
    first = ["const bool live = score > -kInfinity && at.i < ctx.q_len;"]
    first += [f"const float s = {score};"] if re.search(r"\bs\b", text) else []
    return "\n    ".join([*first, text])


def helpers_of(lines: str) -> Iterator[str]:
    """The functions that lines call, with those that these need first."""
    used = [name for name in HELPERS if f"{name}(" in lines or f"{name}<" in lines]
    needed = dict.fromkeys(each for name in used for each in (*NEEDS.get(name, ()), name))
    for name in needed:
        body = HELPERS[name]
        yield body if body.startswith("template") else f"ATTNGEN_HD static {body}"


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
        return _REACH.get(tuple(sorted(bound)), "kAny")

    def lines(self, *values: str) -> list[str]:
        """The lines that values need, in order."""
        operations = self.program.operations
        wanted, found = [*values], set()
        while wanted:
            name = wanted.pop()
            if name.startswith("v") and name not in found:
                found.add(name)
                wanted += operations[int(name[1:])].args
        return [
            f"const {TYPES[each.type]} v{place} = {self.expression(each)};"
            for place, each in enumerate(operations)
            if f"v{place}" in found
        ]

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
