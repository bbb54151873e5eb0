"""Checks of the masks and scores that a call names, and of what it passes to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from ..call.fragment_checks import naming_violations
from ..call.fragments import (
    FragmentOperand,
    is_number,
    misplaced,
    number_wanted,
    operands_of,
)
from ..call.table import AttentionCall
from ..fragments.header import CAPTURED
from ..spec.masks import PLAIN_MASKS
from .fp8_checks import FLOATS
from .operands import Operands
from .sizes import agree_all
from .wording import kind_of, shape_of


def fragment_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Find what is wrong with the masks and scores of a call, and with their arguments."""
    scored = isinstance(call.score_mod, str) or call.fragment_arguments
    if call.mask in PLAIN_MASKS and not scored:
        return
    if isinstance(mask := cast(object, call.mask), Tensor):
        yield f"mask needs a name; got {shape_of(mask)}. Pass booleans a pair as attn_mask."
        return
    wrong = naming_violations(call)
    yield from wrong
    if not wrong:
        yield from _argument_violations(call, operands)


def _argument_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    given = dict(call.fragment_arguments)
    wanted = operands_of(call.mask, call.score_mod)
    for name in given.keys() - {each.name for each in wanted}:
        yield misplaced(name)
    for each in wanted:
        if each.name not in given:
            what = f"{each.fragment.axis} {each.fragment.name!r} needs {each.name}"
            yield f"{what}: {each.operand.doc} Pass {_wanted(each, operands)}."
        elif reason := _misfit(each, given[each.name], operands):
            yield reason


def _wanted(each: FragmentOperand, operands: Operands) -> str:
    """The values that an operand may have, in words."""
    sizes = {"b": operands.batch, "h_q": operands.h_q}
    dtype = "int32" if each.operand.dtype == "i32" else "float32"
    shapes = [", ".join(f"{axis}={sizes[axis]}" for axis in shape) for shape in each.shapes]
    found = [f"{dtype} [{shape}]" for shape in shapes]
    if each.number >= 0:
        found = [number_wanted(each.operand), *found]
    return " or ".join(found)


def _misfit(each: FragmentOperand, value: object, operands: Operands) -> str | None:
    """Why a value cannot be an operand's; None where it can."""
    if each.operand.domain == CAPTURED:  # which the front end has made
        return None
    needs = f"{each.name} needs {_wanted(each, operands)}"
    if not isinstance(value, Tensor):
        if each.number >= 0 and is_number(value, each.operand):
            return None
        return f"{needs}; got {kind_of(value)}. Pass one."
    sizes = {"b": operands.batch, "h_q": operands.h_q}
    shapes = [tuple(sizes[axis] for axis in shape) for shape in each.shapes]
    dtypes = (torch.int32,) if each.operand.dtype == "i32" else FLOATS
    fits = value.dtype in dtypes and any(agree_all(value.shape, shape) for shape in shapes)
    return None if fits else f"{needs}; got {shape_of(value)}. Make it such a tensor."
