"""Calls with functions within transforms of torch.func.

Functions that read nothing that a transform has wrapped are traced, and masks made, as outside of
it. Of others the tensors that they close over become operands, which transforms see.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....call.table import AttentionCall
from .. import routing
from ..torch_private import differentiates_twice, has_transforms, is_wrapped, untransformed
from .compiled import Branch, blocks_of, is_traced_call, lists_of
from .fingerprint import fingerprint


def pass_by(call: AttentionCall) -> bool:
    """Whether no transform is on, or all that it has wrapped of what the functions of a call read
    are tensors that these close over; none of the mask that what they show is joined with."""
    if not has_transforms():
        return True
    if torch.compiler.is_compiling():  # which traces functions before a transform sees them
        return False
    if untransformed is None or routing.CHECK_VALUES or differentiates_twice():
        return False
    masks = call.mask_mod is not None or call.block_mask is not None
    beside: list[Any] = [call.attn_mask] if masks else []
    if call.block_mask is not None:
        beside += lists_of(call.block_mask)
    if any(x is not None and is_wrapped(x) for x in beside):
        return False
    functions = list(_functions_of(call))
    return all(map(_reads_plain_tensors, functions)) or all(map(_can_be_opened, functions))


def opened(call: AttentionCall) -> AttentionCall:
    """A call that `pass_by` lets through, whose functions' tensors are operands if transforms have
    to see them."""
    if not has_transforms() or is_traced_call(call):
        return call
    if all(map(_reads_plain_tensors, _functions_of(call))):
        return call
    own: dict[str, Any] = {}
    for name in call.functions:
        given: Any = getattr(call, name)
        if name == "block_mask":
            mask_mod = _as_branch(given.mask_mod)
            own[name] = blocks_of(lists_of(given), given.BLOCK_SIZE, given.shape, mask_mod)
        else:
            own[name] = _as_branch(given)
    return replace(call, **own)


def aside(call: AttentionCall) -> AbstractContextManager[Any]:
    """Code in which no transform is on, to trace functions of a call and make masks; but of one
    whose functions' tensors are operands."""
    return nullcontext() if is_traced_call(call) else untouched()


def untouched() -> AbstractContextManager[Any]:
    """Code in which no transform is on."""
    on = untransformed is not None and has_transforms()
    return untransformed() if untransformed is not None and on else nullcontext()


def _functions_of(call: AttentionCall) -> Iterator[Any]:
    blocks = call.block_mask
    every = (call.score_mod, call.mask_mod, None if blocks is None else blocks.mask_mod)
    return filter(callable, every)


def _reads_plain_tensors(mod: Any) -> bool:
    """Whether all that a function reads is known, and neither wrapped nor to have gradients."""
    key, tensors = fingerprint(mod)
    return key is not None and not any(is_wrapped(x) or x.requires_grad for x in tensors)


def _can_be_opened(mod: Any) -> bool:
    """Whether a function closes over each tensor that it reads."""
    key, tensors = fingerprint(mod)
    if key is None or type(mod) is not types.FunctionType:
        return False
    own = {*map(id, _closed_over(mod))}
    return all(id(x) in own for x in tensors)


def _closed_over(function: types.FunctionType) -> Iterator[Tensor]:
    """Tensors that a function closes over, and functions that it does, in their order."""
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        if isinstance(content, Tensor):
            yield content
        elif type(content) is types.FunctionType:
            yield from _closed_over(content)


def _as_branch(mod: types.FunctionType) -> Branch:
    """A function whose tensors are operands."""
    tensors = list(_closed_over(mod))

    def graph(*given: Any) -> Any:
        count = len(given) - len(tensors)
        others = {id(x): other for x, other in zip(tensors, given[count:], strict=True)}
        return _over(mod, others)(*given[:count])

    return Branch(graph, tensors)


def _over(function: types.FunctionType, others: dict[int, Any]) -> Callable[..., Any]:
    """A function that closes over other tensors, by what they stand for."""

    def other(x: Any) -> Any:
        return _over(x, others) if type(x) is types.FunctionType else others.get(id(x), x)

    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple([types.CellType(other(cell.cell_contents)) for cell in function.__closure__ or ()]),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
