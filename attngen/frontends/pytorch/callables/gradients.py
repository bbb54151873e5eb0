"""Gradients of tensors that callables capture: autograd's way from the one that kernels make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_private import apply_of, has_transforms


def _unread(captures: Sequence[Tensor]) -> Tensor:
    """Floats in memory that nobody reads, as many as captures have numbers."""
    first, *_ = captures
    count = sum([x.numel() for x in captures])
    return first.new_empty((), dtype=torch.float32).expand(count)


class _Learned(torch.autograd.Function):
    """A tensor whose gradient, float32 [n], has those of others behind each other."""

    @staticmethod
    def forward(ctx: Any, *captures: Tensor) -> Tensor:
        ctx.formats = [(x.shape, x.dtype) for x in captures]
        return _unread(captures)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        parts = gradient.split([shape.numel() for shape, _ in ctx.formats])
        formats = zip(parts, ctx.formats, strict=True)
        return tuple(part.view(shape).to(dtype) for part, (shape, dtype) in formats)


_apply: Callable[..., Tensor] = apply_of(_Learned)


def stand_in(captures: Sequence[Tensor], kept: dict[Any, Tensor] | None = None) -> Tensor:
    """The tensor that stands in a call for what its score learns, float32 [n] for n numbers.

    kept: those of calls without gradients, which nobody reads, by the shapes of captures.
    """
    if has_transforms():
        return torch.cat([x.reshape(-1).float() for x in captures])
    if torch.is_grad_enabled():
        return _apply(*captures)
    if kept is None:
        return _unread(captures)
    shapes = tuple([x.shape for x in captures])
    if (found := kept.get(shapes)) is None:
        kept.clear()
        found = kept[shapes] = _unread(captures)
    return found
