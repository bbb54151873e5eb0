"""Derivatives of the operations, as the dispatcher asks for them and as `torch.func` does.

Its transforms cannot differentiate an operation whose gradients are in Python; they take functions
of autograd that have a `setup_context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from ...errors import SpecError
from . import torch_private
from .operation import unobserved
from .torch_private import is_functional, levels

Outputs = tuple[Tensor, ...]
NO_TANGENTS = "kernels have no forward-mode derivative; pass backend='reference'"


def is_transformed() -> bool:
    """Whether a transform is on that takes functions of autograd: functionalize does not, and
    torch.compile transforms operations."""
    return not torch.compiler.is_compiling() and torch_private.is_transformed()


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raises: SpecError where one has a tangent, or may have one and does not say. Transforms ask
    for the derivative itself."""
    if may_have_tangents(tensors):
        _refuse_forward_mode()


def may_have_tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors has a tangent, or may have one and does not say, and no transform
    asks for the derivative itself."""
    if levels._current_level < 0 or is_transformed():
        return False
    return any(x is not None and _may_have_tangent(x) for x in tensors)


def _may_have_tangent(tensor: Tensor) -> bool:
    hidden = torch.compiler.is_compiling() or is_functional(tensor)
    return hidden or forward_ad.unpack_dual(tensor).tangent is not None


def _refuse_forward_mode() -> NoReturn:
    raise SpecError(NO_TANGENTS)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    pass


def differentiable(
    name: str,
    gradients: Callable[..., Any],
    keep: Callable[[Any, tuple[Any, ...], Outputs], None] = _keep_nothing,
    *,
    library: Library,
    eager: Callable[..., Outputs] | None = None,
) -> Callable[..., Outputs]:
    """Registers the gradients of an operation; returns it for whoever looks on, transforms too.

    keep: what torch calls setup_context. library: its implementations. eager: the implementation
    that calls get which nobody looks on at, past torch's way through Python, which takes
    milliseconds of an operation with many arguments.
    """

    def operation(*inputs: Any) -> Outputs:
        found = getattr(torch.ops.attngen, name)  # anew: it may be defined again
        return found(*inputs)  # type: ignore[no-any-return]

    torch.library.register_autograd(f"attngen::{name}", gradients, setup_context=keep, lib=library)
    transformed = _function_of(operation, gradients, keep)
    if eager is None:
        return lambda *inputs: (transformed if is_transformed() else operation)(*inputs)
    plainly, with_gradients = eager, _function_of(eager, gradients, keep)

    def dispatched(*inputs: Any) -> Outputs:
        if is_transformed():
            return transformed(*inputs)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if torch.compiler.is_compiling() or levels._current_level >= 0 or not unobserved(tensors):
            return operation(*inputs)
        needed = torch.is_grad_enabled() and any([x.requires_grad for x in tensors])
        return (with_gradients if needed else plainly)(*inputs)

    return dispatched


def _function_of(
    operation: Callable[..., Outputs],
    gradients: Callable[..., Any],
    keep: Callable[[Any, tuple[Any, ...], Outputs], None],
) -> Callable[..., Outputs]:
    """An operation as a function of autograd; vmap makes one call of it for each sample."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Outputs:
            return operation(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
            keep(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *of_outputs: Tensor | None) -> Any:
            return gradients(ctx, *of_outputs)

        @staticmethod
        def jvp(ctx: Any, *of_inputs: Any) -> NoReturn:
            _refuse_forward_mode()

        @staticmethod
        def vmap(
            info: Any, in_dims: tuple[int | None, ...], *inputs: Any
        ) -> tuple[Outputs, tuple[int, ...]]:
            """One call for each sample."""
            if not info.batch_size:
                raise SpecError("kernels map over one sample or more; vmap has none")
            dims = [*zip(inputs, in_dims, strict=True)]
            each = [
                apply(*[x if dim is None else x.select(dim, sample) for x, dim in dims])
                for sample in range(info.batch_size)
            ]
            results = tuple(torch.stack(outputs) for outputs in zip(*each, strict=True))
            return results, (0,) * len(results)

    apply: Callable[..., Outputs] = Function.apply
    return apply
