"""Checks of the masks and scores that a call of arrays names, and of what it passes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...call.fragment_checks import naming_violations
from ...call.fragments import (
    FragmentOperand,
    is_number,
    misplaced,
    number_wanted,
    operands_of,
)
from ...call.table import AttentionCall
from ...io.text import quoted
from ...spec.masks import PLAIN_MASKS

IsArray = Callable[[object], bool]


def fragment_violations(call: AttentionCall, is_array: IsArray) -> Iterator[str]:
    """Find what is wrong with the masks and scores of a call, and with their numbers. Dtypes and
    shapes of arrays are those of operands, which are checked as such."""
    named = call.score_mod if isinstance(call.score_mod, str) else False
    if call.mask in PLAIN_MASKS and named is False and not call.fragment_arguments:
        return
    wrong = naming_violations(call)
    yield from wrong
    if not wrong:
        yield from _argument_violations(call, is_array)


def _argument_violations(call: AttentionCall, is_array: IsArray) -> Iterator[str]:
    given = dict(call.fragment_arguments)
    wanted = operands_of(call.mask, call.score_mod)
    for name in given.keys() - {each.name for each in wanted}:
        yield misplaced(name)
    for each in wanted:
        if each.fragment.program:  # which the front end has made
            continue
        needs = f"{each.name} needs {_wanted(each)}"
        value = given.get(each.name)
        if value is None:
            what = f"{each.fragment.axis} {each.fragment.name!r} needs {each.name}"
            yield f"{what}: {each.operand.doc} Pass {_wanted(each)}."
        elif is_array(value):
            if not each.slot:
                yield f"{needs}; got an array. Pass one."
        elif each.number < 0 or not is_number(value, each.operand):
            yield f"{needs}; got {quoted(value)}. Pass one."


def _wanted(each: FragmentOperand) -> str:
    """The values that an operand may have, in words."""
    dtype = "int32" if each.operand.dtype == "i32" else "float32"
    found = [f"{dtype} [{', '.join(shape)}]" for shape in each.shapes]
    if each.number >= 0:
        found = [number_wanted(each.operand), *found]
    return " or ".join(found)
