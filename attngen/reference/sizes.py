"""Sizes that agree: numbers, or the symbols that torch.export and torch.compile trace with.

A symbol that stands for a number is compared as that number, which the trace then depends on. Of
one whose number only a run will show, such as how many tokens a mask keeps, nothing is known: it is
taken to agree, and the run finds out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def agree(one: int, other: int) -> bool:
    """Whether both are the same number, as far as is known."""
    if type(one) is type(other) is int and not torch.compiler.is_compiling():
        return one == other
    return _unless_known(one == other, True)


def agree_all(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether shapes are the same, as far as is known."""
    return len(shape) == len(other) and all(
        [agree(one, two) for one, two in zip(shape, other, strict=True)]
    )


def at_least(number: int, least: int | Tensor | None) -> bool:
    """Whether the number is no less than another, as far as is known; nothing is of one in a
    tensor, which nobody waits for."""
    if least is None or isinstance(least, Tensor):
        return True
    if type(number) is type(least) is int and not torch.compiler.is_compiling():
        return number >= least
    return _unless_known(number >= least, True)


def surely(number: int, value: int) -> bool:
    """Whether a number is known to be this one."""
    if type(number) is int and not torch.compiler.is_compiling():
        return number == value
    return _unless_known(number == value, False)


def _unless_known(found: object, default: bool) -> bool:
    """The outcome of a comparison of sizes, or a default where only a run will show it. In a trace
    of torch.jit sizes are tensors, whose numbers are there."""
    if isinstance(found, Tensor):
        return bool(found)
    from torch.fx.experimental import symbolic_shapes  # loads SymPy

    guard = symbolic_shapes.guard_or_true if default else symbolic_shapes.guard_or_false
    return bool(guard(found))  # type: ignore[arg-type]  # a bool, or a symbol of one
