"""Lowering: a program as the C++ of a score fragment.

No line calls a library function with a slow path: beside a division by IEEE's rules, or a sine of a
large argument, the compiler makes the products of matrices wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from .cpp_operations import HELPERS, NEEDS
from .header import Fragment, Operand
from .names import CAPTURED, NUMBER, PER_UNIT, UNIT, Names, body_of
from .program import TYPES, Program

NUMBER_DTYPES = {"f": "f32", "i": "i32", "l": "i64"}


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
    {body_of(program, applied, result, "score")}
  }}
  // d applied / d score.
  template <class At>
  ATTNGEN_HD float grad(const Context& ctx, float score, float, At at) const {{
    {body_of(program, slope, names.of(program.slope), "0.f")}
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
    {body_of(program, lines, "", "")}
  }}"""


def members_of(program: Program) -> Iterator[str]:
    """Members of a program's struct: its captured tensors and its numbers."""
    for place, (_, rank, type_) in enumerate(program.captures):
        yield f"const void* {CAPTURED}{place};"
        for axis in range(rank):
            yield f"{TYPES[type_]} {CAPTURED}{place}_stride_{axis};"
            yield f"int {CAPTURED}{place}_size_{axis};"
    yield from (f"{TYPES[type_]} {NUMBER}{n};" for n, type_ in enumerate(program.numbers))


def helpers_of(lines: str) -> Iterator[str]:
    """The functions that lines call, with those that these need first."""
    used = [name for name in HELPERS if f"{name}(" in lines or f"{name}<" in lines]
    needed = dict.fromkeys(each for name in used for each in (*NEEDS.get(name, ()), name))
    for name in needed:
        body = HELPERS[name]
        yield body if body.startswith("template") else f"ATTNGEN_HD static {body}"
