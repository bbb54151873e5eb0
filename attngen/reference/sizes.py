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
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # loads SymPy

    return bool(guard_or_true(one == other))


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
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # loads SymPy

    return bool(guard_or_true(number >= least))


def surely(number: int, value: int) -> bool:
    """Whether a number is known to be this one."""
    if type(number) is int and not torch.compiler.is_compiling():
        return number == value
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads SymPy

    return bool(guard_or_false(number == value))
