"""Calls that write their output where the caller says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...call.backend import default
from ...call.bind import Key
from ...call.recipe import in_force
from ...errors import LimitError, SpecError
from ...results import AttentionAux
from . import routing
from .backward import readable
from .calls import bind, calls
from .operation import unobserved
from .torch_private import is_deterministic

Carriers = tuple[Any, Any, Any]
Result = Tensor | tuple[Tensor, AttentionAux]


def state() -> Key:
    """State of torch and of attngen, on which calls depend beside their arguments."""
    return torch.is_grad_enabled(), is_deterministic(), default.backend


def attend(call: Callable[..., Any], carriers: Carriers, given: Mapping[str, Any]) -> Result:
    """A call that has `out`: written by the kernels themselves where these serve a call like it,
    where nobody looks on and the copy engine can reach it; else copied there.

    call: `attention`. Raises: SpecError where `out` does not fit; as the call.
    """
    rest = {name: x for name, x in given.items() if name != "out"}
    out = given["out"]
    _refuse_gradients((out, *carriers, *rest.values()), out)
    if _may_be_reached(carriers, out):
        key, tensors = bind(state(), *carriers, rest)
        if (known := calls.find(key, tensors)) is not None:
            try:
                return known.into(out, tensors, rest.get("schedule"))
            except LimitError:
                pass  # the call itself says what happens
    found = call(*carriers, **rest)
    result, *aux = found if isinstance(found, tuple) else (found,)
    if (result.shape, result.dtype, result.device) != (out.shape, out.dtype, out.device):
        wanted, got = ([*x.shape, x.dtype, str(x.device)] for x in (result, out))
        raise SpecError(f"out needs {wanted}, as the output has it; got {got}")
    out.copy_(result)
    return (out, *aux) if aux else out


def _refuse_gradients(given: tuple[Any, ...], out: Any) -> None:
    """Raises: SpecError where `out` is no tensor, or one of a call has a gradient."""
    if not isinstance(out, Tensor):
        raise SpecError(f"out needs a tensor; got {type(out).__name__}")
    if any([n > 1 and not step for n, step in zip(out.shape, out.stride(), strict=True)]):
        raise SpecError("out has several positions in one place; pass a tensor that has not")
    if not torch.is_grad_enabled():
        return
    if any([isinstance(x, Tensor) and x.requires_grad for x in given]):
        raise SpecError("a call with out has no gradient; call it under torch.no_grad()")


def _may_be_reached(carriers: Carriers, out: Tensor) -> bool:
    """Whether kernels may write there themselves."""
    if torch.compiler.is_compiling() or in_force.recipe is not None or routing.CHECK_VALUES:
        return False
    present = [x for x in carriers if x is not None]
    if not unobserved((*present, out)) or not readable(out):
        return False
    if out.data_ptr() in [x.data_ptr() for x in present]:
        raise SpecError("out lies where an operand does; pass another tensor")
    return True
