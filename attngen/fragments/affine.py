"""Programs that are affine in the score: a factor and a term, neither of which depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .program import Operation, Program
from .program_text import depends_on, reached_from

ONE, ZERO = "1.f", ""
Parts = tuple[str, str]  # C++ of the factor of the score, and of what is added; empty where 0


@dataclass(frozen=True)
class Affine:
    """A score times `factor`, and `term`, C++; the statements that they need, and the values of the
    program that these name."""

    factor: str
    term: str
    statements: tuple[str, ...]
    needs: tuple[str, ...]

    def of(self, score: str, per_unit: str) -> str:
        """The C++ of the result in the units of a score. per_unit: C++, by which a scaled one
        becomes one of these; empty where the term is in them."""
        first = {ONE: score, ZERO: ""}.get(self.factor, f"{score} * {self.factor}")
        last = f"{self.term} * {per_unit}" if self.term and per_unit else self.term
        return " + ".join(filter(None, (first, last))) or "0.f"

    def in_parts(self, score: str, factor: str, term: str) -> str:
        """The C++ of the result, whose factor and term are first multiplied by others, as both are
        worked out once where they are the same for all pairs: the term by itself, or the compiler
        would make a multiply-add of it for each pair."""
        own = factor if self.factor == ONE else f"({self.factor} * {factor})"
        first = f"{score} * {own}" if self.factor else ""
        last = f"times_of({self.term}, {term})" if self.term else ""
        return " + ".join(filter(None, (first, last))) or "0.f"


def affine_of(
    program: Program, name_of: Callable[[str], str], result: str = "", base: str = "s"
) -> Affine | None:
    """The factor and the term of a program's value, or another of its values, `result`; None where
    it is no affine function of the score, or of another value, `base`.

    name_of: the C++ of a value.
    """
    result = result or program.value
    reached = reached_from(program, result)
    found: dict[str, Parts] = {base: (ONE, ZERO)}
    statements: list[str] = []
    needs: list[str] = []

    def parts(value: str) -> Parts:
        if value not in found:
            needs.append(value)
            return ZERO, name_of(value)
        return found[value]

    for place, each in enumerate(program.operations):
        value = f"v{place}"
        if value not in reached or value in found or "s" not in depends_on(program, [value]):
            continue
        if "s" in each.args and base != "s":
            return None
        made = _combined(each, [parts(arg) for arg in each.args]) if each.type == "f" else None
        if made is None:
            return None
        named = []
        for letter, expression in zip("ab", made, strict=True):
            if not expression.replace("_", "").isalnum() and expression != ONE and expression:
                statements.append(f"const float {letter}{place} = {expression};")
                expression = f"{letter}{place}"
            named.append(expression)
        found[f"v{place}"] = (named[0], named[1])
    factor, term = parts(result)
    return Affine(factor, term, tuple(statements), tuple(needs))


def _combined(operation: Operation, parts: list[Parts]) -> Parts | None:
    """The factor and the term of an operation of these; None where it is not affine in them."""
    factors = [factor for factor, _ in parts]
    match operation.name:
        case "add":
            first, other = parts
            return _plus(first[0], other[0]), _plus(first[1], other[1])
        case "sub":
            first, other = parts
            return _minus(first[0], other[0]), _minus(first[1], other[1])
        case "neg":
            ((factor, term),) = parts
            return _minus(ZERO, factor), _minus(ZERO, term)
        case "mul" if ZERO in factors:
            first, other = parts if factors[1] == ZERO else parts[::-1]
            return _times(first[0], other[1]), _times(first[1], other[1])
        case "div" if factors[1] == ZERO:
            first, other = parts
            made = [f"quotient_of({each}, {other[1]})" if each else ZERO for each in first]
            return made[0], made[1]
        case "where" if factors[0] == ZERO:
            (_, condition), first, other = parts
            made = [
                f"{condition} ? {x or '0.f'} : {y or '0.f'}" if x or y else ZERO
                for x, y in zip(first, other, strict=True)
            ]
            return made[0], made[1]
    return None


def _plus(x: str, y: str) -> str:
    return f"{x} + {y}" if x and y else x or y


def _minus(x: str, y: str) -> str:
    if not y:
        return x
    return f"{x} - {y}" if x else f"-{y}"


def _times(x: str, y: str) -> str:
    if not x:
        return ZERO
    return y if x == ONE else f"{x} * {y}"
