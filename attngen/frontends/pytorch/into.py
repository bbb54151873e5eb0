"""Calls that write their output where the caller says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...call.memory import has_one_place_each, share_bytes
from ...call.recipe import in_force
from ...call.table import CARRIERS
from ...errors import LimitError, SpecError
from ...results import AttentionAux
from . import routing
from .backward import readable
from .calls import bind, calls, state
from .operation import unobserved
from .torch_private import is_plain, share_storage

Carriers = tuple[Any, Any, Any]
Result = Tensor | tuple[Tensor, AttentionAux]


def attend(call: Callable[..., Any], carriers: Carriers, given: Mapping[str, Any]) -> Result:
    """A call that has `out`: written by the kernels themselves where these serve a call like it,
    where nobody looks on and the copy engine can reach it; else copied there.

    call: `attention`. Raises: SpecError where `out` does not fit; as the call.
    """
    rest = {name: x for name, x in given.items() if name != "out"}
    out = given["out"]
    operands = {**dict(zip(CARRIERS, carriers, strict=True)), **rest}
    _refuse_gradients((out, *operands.values()), out)
    if _is_seen(carriers, out):
        _refuse_overlaps(operands, out)
        key, tensors = bind(state(), *carriers, rest)
        if readable(out) and (known := calls.find(key, tensors)) is not None:
            try:
                written = known.into(out, tensors, rest.get("schedule"))
            except LimitError:
                pass  # the call itself says what happens
            else:
                torch.autograd.graph.increment_version(out)  # kernels tell autograd nothing
                return written
    found = call(*carriers, **rest)
    result, *aux = found if isinstance(found, tuple) else (found,)
    if (result.shape, result.dtype, result.device) != (out.shape, out.dtype, out.device):
        wanted, got = ([*x.shape, x.dtype, str(x.device)] for x in (result, out))
        raise SpecError(f"out needs {wanted}, as the output has it; got {got}")
    _refuse_gradients((result,), out)
    out.copy_(result)
    return (out, *aux) if aux else out


def _refuse_gradients(given: tuple[Any, ...], out: Any) -> None:
    """Raises: SpecError where `out` is no tensor, or one of a call has a gradient."""
    if not isinstance(out, Tensor):
        raise SpecError(f"out needs a tensor; got {type(out).__name__}")
    traced = torch.compiler.is_compiling() or out.is_nested
    if not (traced or has_one_place_each(out.shape, out.stride())):
        raise SpecError("out has several positions in one place; pass a tensor that has not")
    if not torch.is_grad_enabled():
        return
    if any([isinstance(x, Tensor) and x.requires_grad for x in given]):
        raise SpecError("a call with out has no gradient; call it under torch.no_grad()")


def _refuse_overlaps(operands: Mapping[str, Any], out: Tensor) -> None:
    """Raises: SpecError where `out` lies over an operand, which kernels read while they write."""
    at = out.data_ptr()
    for name, x in operands.items():
        if not isinstance(x, Tensor) or not (name in CARRIERS or is_plain(x)):
            continue  # carriers are known to be plain
        near = share_storage(x, out) or 0 != x.data_ptr() == at
        if near and share_bytes(out, at, x, x.data_ptr()):
            raise SpecError(f"out lies where {name} does; pass another tensor")


def _is_seen(carriers: Carriers, out: Tensor) -> bool:
    """Whether addresses say where a call reads and writes, and kernels may write there."""
    if torch.compiler.is_compiling() or in_force.recipe is not None or routing.CHECK_VALUES:
        return False
    return unobserved((*[x for x in carriers if x is not None], out))
