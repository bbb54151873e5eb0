"""Lowering: a program as the C++ of a score fragment.

No line calls a library function with a slow path: beside a division by IEEE's rules, or a sine of a
large argument, the compiler makes the products of matrices wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from .affine import Affine, affine_of
from .cpp_operations import HELPERS, NEEDS
from .header import Fragment, Operand
from .names import CAPTURED, DIAGONAL, NUMBER, PER_UNIT, UNIT, Names, body_of
from .program import ONE, TYPES, Operation, Program
from .program_text import depends_on
from .score_lines import ScoreLines, lines_of, scaled_line, turned_lines_of

NUMBER_DTYPES = {"f": "f32", "i": "i32", "l": "i64"}
_NO_LINES = ScoreLines()
_OF_LINES = {"column": "a key", "row": "a query", "distance": "pairs of a distance"}


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
    kept, every = lines_of(program), lines_of(program, learns=True)
    turned = turned_lines_of(program)
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
        reaches=reaches_of(program),
        lines=(len(kept.columns), len(kept.distances)),
        learned_lines=(len(every.columns), len(every.distances)),
        turned_lines=(len(turned.rows), len(turned.distances)),
        text=f"<% macro emit() %>\n{struct_of(program, struct)}\n<% endmacro %>\n",
        program=program.text,
    )


def reaches_of(program: Program) -> tuple[str, ...]:
    """Which elements of a tile read one number by each load that has a derivative; by distances
    kernels sum one load's."""
    names, found = Names(program), []
    for load, _ in program.learned:
        reach = names.reach(load)
        found.append("kAny" if reach == DIAGONAL and DIAGONAL in found else reach)
    return tuple(found)


def learns_at_keys(program: Program) -> bool:
    """Whether all that a program learns takes sums of its keys' gradients alone: it only adds, and
    neither what it reads nor derivatives by it depend on queries."""
    if not (program.learned and program.additive):
        return False
    derivatives = [derivative for _, derivative in program.learned]
    of_keys = {*reaches_of(program)} <= {"kTile", "kColumn"}
    return of_keys and not depends_on(program, derivatives) & {"s", "i"}


def learns_at_queries(program: Program) -> bool:
    """Whether all that a program learns is what it multiplies scores by, a number a query: the
    gradient of a query, times the query, is that number times its own gradient. That is made of
    rounded dS, whose errors sums over many queries would show, as of `x[i % 4]`."""
    if len(program.learned) != 1:
        return False
    ((load, derivative),) = program.learned
    _, *indices = program.operation(load).args
    of_query = "i" in indices and reaches_of(program) == ("kRow",)
    return of_query and derivative == "s" and program.slope == load


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
    """The C++ of a program: a struct of that name, with `apply` and `grad`, and what makes lines of
    a tile for kernels that keep them."""
    names, kept = Names(program), lines_of(program)
    turned = turned_lines_of(program)
    applied = _by_lines(kept, lambda places: _applied(program, names, places), turned)
    slope = _by_lines(_NO_LINES, lambda places: _slope(program, names, places), turned)
    units = (f"float {UNIT};", f"float {PER_UNIT};")
    members = "\n  ".join((*members_of(program), *units))
    learned = _learn(program, names) if program.learned else ""
    every = lines_of(program, learns=True)
    made = _lines(program, names, "column", "j", every.columns, len(kept.columns))
    made += _lines(program, names, "distance", "distance", every.distances, len(kept.distances))
    made += _lines(program, names, "row", "i", turned.rows, len(turned.rows))
    helpers = "\n  ".join(helpers_of("\n".join([applied, slope, learned, made])))
    return f"""struct {struct} {{
  {members}

  {helpers}
  template <class At>
  ATTNGEN_HD float apply(const Context& ctx, float score, At at) const {{
    {applied}
  }}
  // d applied / d score.
  template <class At>
  ATTNGEN_HD float grad(const Context& ctx, float score, float, At at) const {{
    {slope}
  }}{made}{learned}
}};"""


def _by_lines(
    lines: ScoreLines,
    make: Callable[[Mapping[str, str]], str],
    turned: ScoreLines = _NO_LINES,
) -> str:
    """Statements for kernels that keep lines, and for others. make: what makes them, of the C++ of
    values that lines have; turned: lines of kernels of keys."""
    kept = {"At::kTurned": turned, "At::kLines": lines}
    found = {test: make(each.places) for test, each in kept.items() if each.places}
    if not found:
        return make({})
    found = {test: each.replace("\n", "\n  ") for test, each in found.items()}
    own = make({}).replace("\n", "\n  ")
    branches = [f"if constexpr ({test}) {{\n      {each}\n    }}" for test, each in found.items()]
    return " else ".join([*branches, f"{{\n      {own}\n    }}"])


def _slope(program: Program, names: Names, kept: Mapping[str, str]) -> str:
    """The statements of `grad`. kept: the C++ of values that lines have."""
    lines, slope = names.lines(program.slope, kept=kept), names.of(program.slope)
    if learns_at_queries(program):
        slope = f"apart_of({slope})"  # by which gradients are divided again
    return body_of(program, lines, slope, "0.f")


def _applied(program: Program, names: Names, kept: Mapping[str, str]) -> str:
    """The statements of `apply`. kept: the C++ of values that lines have."""
    affine = affine_of(program, names.of)
    if affine is None:
        lines, result = names.lines(program.value, kept=kept), names.of(program.value)
        made = program.operation(program.value)
        if made.name == "div":
            return _quotient(program, names, made, kept)
        return body_of(program, lines, f"{result} * {PER_UNIT}", "score")
    lines = [*names.lines(*affine.needs, kept=kept), *affine.statements]
    per_unit = "" if kept.get(affine.term, "") and affine.term == scaled_line(program) else PER_UNIT
    return body_of(program, lines, affine.of("score", per_unit), "score")


def _quotient(program: Program, names: Names, made: Operation, kept: Mapping[str, str]) -> str:
    """Statements that return a quotient in the units of a score: with few operations a pair where
    it is of what is affine in the score, and no derivative has some of them, too."""
    above, below = made.args
    quotient = ", ".join([names.of(above), names.of(below), PER_UNIT])
    own = names.lines(*made.args, kept=kept)
    plain = body_of(program, own, f"quotient_of({quotient})", "score")
    top, divisor = affine_of(program, names.of, above), _divisor(program, names)
    if top is None or divisor is None:
        return plain
    bottom, base, unit = divisor
    lines = names.lines(*top.needs, *bottom.needs, kept=kept)
    lines += dict.fromkeys((*top.statements, *bottom.statements))
    if top.term or depends_on(program, top.needs) & {"i", "j"}:
        # Of quarters, as the reciprocal of the largest would be 0.
        over = top.in_parts("score", f"({UNIT} * (0.25f * {PER_UNIT}))", f"(0.25f * {PER_UNIT})")
        under = bottom.in_parts(base, f"(0.25f * {unit})", "0.25f")
    else:  # a multiple of the score, by which the divisor is divided once
        lines.append(f"const float share = reciprocal_of(apart_of({top.factor}));")
        over, under = "score", bottom.in_parts(base, f"({unit} * share)", "share")
    short = body_of(program, lines, f"({over}) * reciprocal_of({under})", "score")
    plain, short = (each.replace("\n", "\n  ") for each in (plain, short))
    return f"if constexpr (At::kDerived) {{\n      {plain}\n    }} else {{\n      {short}\n    }}"


def _divisor(program: Program, names: Names) -> tuple[Affine, str, str] | None:
    """Find what a program's value is divided by last, where that is affine in the score, or in its
    magnitude: with the C++ of the one or the other, and by what it is multiplied to be scaled."""
    made = program.operation(program.value) if program.value.startswith("v") else None
    if made is None or made.name != "div":
        return None
    found = affine_of(program, names.of, made.args[1])
    if found is not None:
        return found, "score", UNIT
    whole = (f"v{n}" for n, each in enumerate(program.operations) if each.text == "abs f s")
    found = affine_of(program, names.of, made.args[1], base=next(whole, "s"))
    if found is None:
        return None
    return found, "magnitude_of(score)", f"magnitude_of({UNIT})"


def _lines(
    program: Program, names: Names, kind: str, index: str, values: Sequence[str], fewest: int
) -> str:
    """The C++ of a member that makes the lines of a key or of a distance; empty where there are
    none. fewest: how many of them kernels want that do not learn."""
    if not values:
        return ""
    made, scaled = [], scaled_line(program)
    for begin, end in ((0, fewest), (fewest, len(values))):
        wanted = values[begin:end]
        lines = names.lines(*wanted)
        for place, value in enumerate(wanted, begin):
            is_float = program.operation(value).type == "f"
            bits = value if is_float else f"__builtin_bit_cast(float, {value})"
            unit = f" * {PER_UNIT}" if value == scaled else ""
            lines.append(f"lines[{place}] = {bits}{unit};")
        made.append("\n    ".join(lines))
    first, rest = made
    if rest:
        rest = rest.replace("\n", "\n  ")
        rest = f"if constexpr (kCount > {fewest}) {{\n      {rest}\n    }}"
    body = "\n    ".join(filter(None, (first, rest)))
    return f"""
  // What scores of {_OF_LINES[kind]} have in common.
  template <int kCount>
  ATTNGEN_HD void make_{kind}(const Context& ctx, int {index}, float (&lines)[kCount]) const {{
    const ScoreSpot at = {{{"i, 0" if kind == "row" else f"0, {index}"}}};
    {body}
  }}"""


def _learn(program: Program, names: Names) -> str:
    """The C++ of a program's members that add to gradients of captured tensors, which lie in the
    sums behind each other in the order of the tensors."""
    kept = lines_of(program, learns=True)
    places = "".join(_place(program, names, kept, number) for number in range(len(program.learned)))

    def learn(at_hand: Mapping[str, str]) -> str:
        lines = names.lines(*[derivative for _, derivative in program.learned], kept=at_hand)
        for number, ((_, derivative), reach) in enumerate(
            zip(program.learned, reaches_of(program), strict=True)
        ):
            own = names.of(derivative)
            value = "gradient" if derivative == ONE else f"gradient * {own}"
            lines.append(
                f"sums.template add<{number}, Sums::{reach}>(*this, ctx, at, live ? {value} : 0.f);"
            )
        return body_of(program, lines, "", "")

    of_lines = _learn_keys(program, names) if learns_at_keys(program) else ""
    of_lines += _learn_row(program, names) if learns_at_queries(program) else ""
    return f"""
  // Where the number lies in the sums that load kLoad reads.
  template <int kLoad, class At>
  ATTNGEN_HD long long place(const Context& ctx, At at) const {{{places}
  }}{of_lines}
  // Adds the derivatives by captured numbers, times that of the result.
  template <class At, class Sums>
  ATTNGEN_HD void learn(const Context& ctx, float score, float gradient, At at, Sums& sums) const {{
    {_by_lines(kept, learn)}
  }}"""


def _learn_keys(program: Program, names: Names) -> str:
    """The C++ of the member that adds derivatives of all scores of a key at once: none of keys that
    nobody sees, or that are none, whatever is captured for them."""
    lines = names.lines(*[derivative for _, derivative in program.learned])
    for number, ((_, derivative), reach) in enumerate(
        zip(program.learned, reaches_of(program), strict=True)
    ):
        value = "gradient"
        if derivative != ONE:
            value = f"gradient == 0.f ? 0.f : gradient * {names.of(derivative)}"
        lines.append(f"sums.template add<Sums::{reach}>(place<{number}>(ctx, at), {value});")
    body = "\n    ".join(lines)
    return f"""
  // Adds the derivatives of all scores of a key, of whose results this is a thread's gradient.
  template <class Sums>
  ATTNGEN_HD void learn_key(const Context& ctx, ScoreSpot at, float gradient, Sums& sums) const {{
    {body}
  }}"""


def _learn_row(program: Program, names: Names) -> str:
    """The C++ of the member that adds derivatives of all scores of a query at once: none of those
    that see nothing, or that are none, whatever is captured for them."""
    ((load, _),) = program.learned
    found = f"product == 0.f ? 0.f : product / apart_of({names.of(load)})"
    added = f"sums.template add<Sums::kRow>(place<0>(ctx, at), {found});"
    body = "\n    ".join([*names.lines(load), added])
    return f"""
  // Adds the derivatives of all scores of a query: of its gradient times itself, a thread's part.
  template <class Sums>
  ATTNGEN_HD void learn_row(const Context& ctx, ScoreSpot at, float product, Sums& sums) const {{
    {body}
  }}"""


def _place(program: Program, names: Names, kept: ScoreLines, number: int) -> str:
    """The C++ of the place of what a load reads."""
    load, _ = program.learned[number]
    capture, *indices = program.operation(load).args
    place = ""
    for before in program.learned_captures[: program.learned_captures.index(int(capture))]:
        _, rank, _ = program.captures[before]
        sizes = " * ".join(["1ll", *(f"{CAPTURED}{before}_size_{n}" for n in range(rank))])
        place += f"{sizes} + "
    own = "0ll"
    for axis, index in enumerate(indices):
        size = f"static_cast<long long>({CAPTURED}{capture}_size_{axis})"
        own = (
            f"({own}) * {size} + {names.index(capture, axis, index)}"
            if axis
            else names.index(capture, axis, index)
        )

    def found(at_hand: Mapping[str, str]) -> str:
        lines = names.lines(*indices, kept=at_hand)
        return "\n    ".join([*lines, f"return {place}{own};"])

    return f"""
    if constexpr (kLoad == {number}) {{
    {_by_lines(kept, found)}
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
