"""Functions that are recalled at once: by their code, and by what they close over.

A fingerprint walks whatever a function reaches. One that reaches numbers, tensors and parts of
torch alone, as most do, is compared with what one of the same code reached before, a value at a
time, in the order of its fingerprint.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fingerprint import is_fixed, names_of

_TENSORS = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_MOST_CODES, _MOST_FUNCTIONS = 1024, 8  # that are kept, and of one code
_ABSENT = object()


class _Format(NamedTuple):
    """The part of a tensor that a trace depends on."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    learned: bool


@dataclass(frozen=True, eq=False)
class _Memory:
    """A function's values, of cells, then of globals of these names: their types, and formats of
    tensors, or what others are.

    absent: names that were no globals; found: what is
    known of the function.
    """

    kind: Any
    code: types.CodeType
    names: tuple[str, ...]
    absent: tuple[str, ...]
    values: tuple[tuple[Any, Any], ...]
    found: Any

    def tensors_of(self, function: types.FunctionType) -> list[Tensor] | None:
        """The tensors of a function of this code, in order; None where other values differ."""
        space = function.__globals__
        values: list[Any] = [cell.cell_contents for cell in function.__closure__ or ()]
        values += [space.get(name, _ABSENT) for name in self.names]
        tensors: list[Tensor] = []
        for x, (kind, wanted) in zip(values, self.values, strict=True):
            if type(x) is not kind:
                return None
            if kind in _TENSORS:
                if x.shape != wanted.shape or x.dtype is not wanted.dtype:
                    return None
                if x.stride() != wanted.strides or x.requires_grad is not wanted.learned:
                    return None
                if x.device != wanted.device:
                    return None
                tensors.append(x)
            elif x is not wanted and x != wanted:
                return None
        if len(tensors) > 1 and len({*map(id, tensors)}) < len(tensors):
            return None
        return None if self.absent and not space.keys().isdisjoint(self.absent) else tensors


_memories: dict[int, list[_Memory]] = {}  # by the identity of code, which they keep


def recall(kind: Any, function: Any) -> tuple[Any, list[Tensor]] | None:
    """Find what is known of a function and the tensors that it reaches, in the order of its
    fingerprint; None where that has to say so. kind: what else tells it from others."""
    if type(function) is not types.FunctionType:
        return None
    for each in _memories.get(id(function.__code__), ()):
        if each.kind == kind and not (function.__defaults__ or function.__kwdefaults__):
            try:
                tensors = each.tensors_of(function)
            except ValueError:  # a cell without contents
                return None
            if tensors is not None and not vars(function):
                return each.found, tensors
    return None


def remember(kind: Any, function: Any, found: Any) -> None:
    """Let a function be recalled, and others of its code that close over the like, if it reaches
    numbers, tensors and parts of torch alone. kind: as `recall` has it; found: what is known."""
    if type(function) is not types.FunctionType or vars(function):
        return
    if function.__defaults__ or function.__kwdefaults__:
        return
    space, names = function.__globals__, names_of(function.__code__)
    known = tuple(sorted(names & space.keys()))
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [space[each] for each in known]
    tensors = [x for x in values if type(x) in _TENSORS]
    if len({*map(id, tensors)}) < len(tensors) or not all(map(_is_compared, values)):
        return
    if str(function.__module__).partition(".")[0] == "torch":
        return  # whose globals a fingerprint leaves out
    if len(_memories) >= _MOST_CODES:
        _memories.clear()
    kept = _memories.setdefault(id(function.__code__), [])
    made = tuple((type(x), _format_of(x)) for x in values)
    absent = tuple(names - space.keys())
    kept.insert(0, _Memory(kind, function.__code__, known, absent, made, found))
    del kept[_MOST_FUNCTIONS:]


def _format_of(x: Any) -> Any:
    """The format of a tensor; another value as it is."""
    if type(x) not in _TENSORS:
        return x
    return _Format(x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


def _is_compared(x: Any) -> bool:
    """Whether a value is told from others by its type and by being equal, or by being itself."""
    if type(x) is float:
        return x == x and x != 0  # 0 and -0 are equal, and NaN is not
    if type(x) in _TENSORS:
        return bool(x.layout is torch.strided)
    return type(x) in _NUMBERS or is_fixed(x)
