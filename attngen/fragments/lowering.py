"""Lowering: a program as the C++ of a score fragment.

No line calls a library function with a slow path: beside a division by IEEE's rules, or a sine of a
large argument, the compiler makes the products of matrices wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from .header import Fragment, Operand
from .program import ELEMENTS, POSITIONS, TYPES, Operation, Program

CAPTURED, NUMBER = "captured_", "number_"  # of the names of its fragment's operands
UNIT, PER_UNIT = "score_unit", "score_per_unit"
_NUMBER_DTYPES = {"f": "f32", "i": "i32", "l": "i64"}
_PLACES = {"b": "ctx.batch", "h": "ctx.head", "i": "at.i", "j": "at.j"}
# Functions that lines may call, each with the C++ of its body; `x`, `y` are floats.
_HELPERS = {
    "quotient_of": """float quotient_of(float x, float y) {
    // The reciprocal of a larger one would be 0.
    const float shrink = magnitude_of(y) > 0x1p120f ? 0x1p-24f : 1.f;
    return x * shrink * reciprocal_of(y * shrink);
  }""",
    "ratio_of": """float ratio_of(float x, float y) {
    // As IEEE's division has it: floors of quotients of integers show the last bit.
    const float ratio = quotient_of(x, y);
#if defined(__CUDACC__)
    const float rest = __fmaf_rn(-ratio, y, x);
#else
    const float rest = __builtin_fmaf(-ratio, y, x);
#endif
    return rest == rest ? ratio + rest * reciprocal_of(y) : ratio;
  }""",
    "exp_of": "float exp_of(float x) { return exp2_of(x * kLog2E); }",
    "sigmoid_of": "float sigmoid_of(float x) { return reciprocal_of(1.f + exp2_of(x * -kLog2E)); }",
    "tanh_of": """float tanh_of(float x) {
    return 1.f - 2.f * reciprocal_of(1.f + exp2_of(x * (2.f * kLog2E)));
  }""",
    "log_of": "float log_of(float x) { return log2_of(x) * kLn2; }",
    "log1p_of": "float log1p_of(float x) { return log2_of(1.f + x) * kLn2; }",
    "expm1_of": "float expm1_of(float x) { return exp2_of(x * kLog2E) - 1.f; }",
    "rsqrt_of": """float rsqrt_of(float x) {
#if defined(__CUDACC__)
    return rsqrtf(x);
#else
    return 1.f / __builtin_sqrtf(x);
#endif
  }""",
    "sqrt_of": """float sqrt_of(float x) {
    return x == 0.f || x == kInfinity ? x : x * rsqrt_of(x);
  }""",
    "floor_of": """float floor_of(float x) {
#if defined(__CUDACC__)
    return floorf(x);
#else
    return __builtin_floorf(x);
#endif
  }""",
    "ceil_of": """float ceil_of(float x) {
#if defined(__CUDACC__)
    return ceilf(x);
#else
    return __builtin_ceilf(x);
#endif
  }""",
    "trunc_of": """float trunc_of(float x) {
#if defined(__CUDACC__)
    return truncf(x);
#else
    return __builtin_truncf(x);
#endif
  }""",
    "round_of": """float round_of(float x) {
#if defined(__CUDACC__)
    return rintf(x);
#else
    return __builtin_rintf(x);
#endif
  }""",
    "wave_of": """float wave_of(float x, float quarter) {
    // Whole turns off in two steps; `quarter` 1 makes a sine a cosine.
    const float turns = round_of(x * 0.15915494f);
    const float rest = (x - turns * 6.28125f) - turns * 1.9353072e-3f;
#if defined(__CUDACC__)
    return quarter != 0.f ? __cosf(rest) : __sinf(rest);
#else
    return quarter != 0.f ? __builtin_cosf(rest) : __builtin_sinf(rest);
#endif
  }""",
    "erf_of": """float erf_of(float x) {
#if defined(__CUDACC__)
    return erff(x);
#else
    return __builtin_erff(x);
#endif
  }""",
    "power_of": """float power_of(float x, float y) {
    const float power = exp2_of(y * log2_of(magnitude_of(x)));
    if (y == 0.f) return 1.f;
    if (x >= 0.f || x != x) return power;
    const float whole = trunc_of(y);
    if (whole != y) return kInfinity - kInfinity;
    return trunc_of(y * 0.5f) * 2.f == y ? power : -power;
  }""",
    "floor_divide": """template <class T>
  ATTNGEN_HD static T floor_divide(T x, T y) {
    if (y == 0) return 0;
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
  }""",
    "remainder_of": """template <class T>
  ATTNGEN_HD static T remainder_of(T x, T y) {
    if (y == 0) return 0;
    const T rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
  }""",
    "lower_of": """template <class T>
  ATTNGEN_HD static T lower_of(T x, T y) { return x != x || x < y ? x : y; }""",
    "higher_of": """template <class T>
  ATTNGEN_HD static T higher_of(T x, T y) { return x != x || x > y ? x : y; }""",
    "index_of": """template <class T>
  ATTNGEN_HD static int index_of(T x, int size) {
    const T counted = x < 0 ? x + size : x;  // from the end
    return static_cast<int>(max_of(min_of(counted, static_cast<T>(size - 1)), static_cast<T>(0)));
  }""",
    "read_of": """template <class T>
  ATTNGEN_HD static T read_of(const void* tensor, long long place) {
#if defined(__CUDACC__)
    return __ldg(static_cast<const T*>(tensor) + place);
#else
    return static_cast<const T*>(tensor)[place];
#endif
  }""",
}
_NEEDS = {
    "ratio_of": ("quotient_of",),
    "sqrt_of": ("rsqrt_of",),
    "wave_of": ("round_of",),
    "power_of": ("trunc_of",),
}
# Operations that are one expression of their arguments.
_FORMS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in (
        ("add", "+"), ("sub", "-"), ("mul", "*"), ("and", "&"), ("or", "|"), ("xor", "^"),
        ("shl", "<<"), ("shr", ">>"), ("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"),
        ("eq", "=="), ("ne", "!="))},
    **{name: f"{name}_of({{0}})" for name in (
        "exp", "sigmoid", "tanh", "log", "log1p", "expm1", "rsqrt", "sqrt", "erf")},
    "exp2": "exp2_of({0})",
    "log2": "log2_of({0})",
    "sin": "wave_of({0}, 0.f)",
    "cos": "wave_of({0}, 1.f)",
    "pow": "power_of({0}, {1})",
    "recip": "quotient_of(1.f, {0})",
    "div": "quotient_of({0}, {1})",
    "ratio": "ratio_of({0}, {1})",
    "floor": "floor_of({0})",
    "ceil": "ceil_of({0})",
    "trunc": "trunc_of({0})",
    "round": "round_of({0})",
    "neg": "-{0}",
    "not": "!{0}",
    "invert": "~{0}",
    "min": "lower_of({0}, {1})",
    "max": "higher_of({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "fdiv": "floor_divide({0}, {1})",
    "tdiv": "({1} == 0 ? 0 : {0} / {1})",
    "mod": "remainder_of({0}, {1})",
    "fmod": "({1} == 0 ? 0 : {0} % {1})",
}  # fmt: skip
# Others, of floats and of integers.
_SIGNED = {
    "abs": ("magnitude_of({0})", "{0} < 0 ? -{0} : {0}"),
    "sign": ("static_cast<float>(({0} > 0.f) - ({0} < 0.f))", "({0} > 0) - ({0} < 0)"),
}


@cache
def fragment_of(program: Program) -> Fragment:
    """The score fragment of a program, whose text is rendered with it.

    Its operands are what calls pass: tensors `captured_0` …, numbers `number_0` …, and the number 1
    as `score_unit` and `score_per_unit`, by which kernels say the unit of their scores.
    """
    operands = [
        *(Operand(f"{CAPTURED}{place}", "captured", _NUMBER_DTYPES[type_], "A captured tensor.",
                  rank=rank, element=dtype)
          for place, (dtype, rank, type_) in enumerate(program.captures)),
        *(Operand(f"{NUMBER}{place}", "scalar", _NUMBER_DTYPES[type_], "A number of the callable.")
          for place, type_ in enumerate(program.numbers)),
        Operand(UNIT, "scalar", "f32", "1.", score_power=-1),
        Operand(PER_UNIT, "scalar", "f32", "1.", score_power=1),
    ]  # fmt: skip
    struct = "".join(word.capitalize() for word in program.name.split("_"))
    return Fragment(
        axis="score",
        name=program.name,
        doc="A traced score_mod.",
        struct=struct,
        bounds=(),
        selected_by="score",
        operands=tuple(operands),
        additive=program.additive,
        text=f"<% macro emit() %>\n{struct_of(program, struct)}\n<% endmacro %>\n",
        traced=True,
    )


def struct_of(program: Program, struct: str) -> str:
    """The C++ of a program: a struct of that name, with `apply` and `grad`."""
    names = _Names(program)
    applied, slope = names.lines(program.value), names.lines(program.slope)
    result = f"{names.of(program.value)} * {PER_UNIT}"
    result = f"score + {result}" if program.additive else result
    members = "\n  ".join(_members(program))
    helpers = "\n  ".join(_helpers("\n".join([*applied, *slope])))
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
  }}
}};"""


def _members(program: Program) -> Iterator[str]:
    """Members of the struct, in the order of the fragment's operands."""
    for place, (_, rank, type_) in enumerate(program.captures):
        yield f"const void* {CAPTURED}{place};"
        for axis in range(rank):
            yield f"{TYPES[type_]} {CAPTURED}{place}_stride_{axis};"
            yield f"int {CAPTURED}{place}_size_{axis};"
    yield from (f"{TYPES[type_]} {NUMBER}{n};" for n, type_ in enumerate(program.numbers))
    yield from (f"float {UNIT};", f"float {PER_UNIT};")


def _body(program: Program, lines: list[str], result: str, hidden: str) -> str:
    """Lines that return a result, and another one where a mask hides the score, which a backward
    then has as -inf, and for rows behind the last."""
    text = "\n    ".join([*lines, f"return live ? {result} : {hidden};"])
    score = "0.f" if program.additive else f"live ? score * {UNIT} : 0.f"
    first = ["const bool live = score > -kInfinity && at.i < ctx.q_len;"]
    first += [f"const float s = {score};"] if re.search(r"\bs\b", text) else []
    return "\n    ".join([*first, text])


def _helpers(lines: str) -> Iterator[str]:
    """The functions that lines call, with those that these need first."""
    used = [name for name in _HELPERS if f"{name}(" in lines or f"{name}<" in lines]
    needed = dict.fromkeys(each for name in used for each in (*_NEEDS.get(name, ()), name))
    for name in needed:
        body = _HELPERS[name]
        yield body if body.startswith("template") else f"ATTNGEN_HD static {body}"


class _Names:
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

    def lines(self, value: str) -> list[str]:
        """The lines that a value needs, in order."""
        operations = self.program.operations
        wanted, found = [value], set()
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
        if operation.name in _SIGNED:
            return _SIGNED[operation.name][operation.type != "f"].format(*given)
        plain = {"fdiv": "{0} / {1}", "mod": "{0} % {1}"}
        if operation.name in plain and self._divides_simply(operation):
            return plain[operation.name].format(*given)
        if operation.type == "b" and operation.name in ("add", "mul"):
            return f"{given[0]} {'||' if operation.name == 'add' else '&&'} {given[1]}"
        return _FORMS[operation.name].format(*given)

    def _divides_simply(self, operation: Operation) -> bool:
        """Whether a quotient of ints is what C++ makes it: no sign, and a divisor that is known."""
        number, divisor = operation.args
        _, is_literal, word = divisor.partition(":")
        return bool(is_literal) and int(word) > 0 and number in self.positive

    def _load(self, capture: str, *indices: str) -> str:
        dtype, *_ = self.program.captures[int(capture)]
        name = CAPTURED + capture
        terms = []
        for axis, index in enumerate(indices):
            at, size = self.of(index), f"{name}_size_{axis}"
            if index in POSITIONS:
                at = f"min_of({at}, {size} - 1)"
            else:
                at = f"index_of({at}, {size})"
            terms.append(f"{at} * {name}_stride_{axis}")
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
