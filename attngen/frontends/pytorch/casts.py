"""Operands of a call in the dtypes that operations take, on the device and without a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...call.fp8_checks import BIAS_DTYPE
from ...call.table import INPUTS, LENGTHS, PAGE_TABLES
from ...reference.conversions import dtype_of, saturated
from ...reference.fp8 import is_fp8
from ...reference.sizes import surely
from .signature import Operands

Casts = tuple[tuple[int, torch.dtype], ...]  # places among the operands
_INTEGERS = (*LENGTHS, *PAGE_TABLES)
_BIAS = getattr(torch, BIAS_DTYPE)


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors, float32 ones in the dtype of the autocast that is on."""
    first = next(x for x in tensors if x is not None)
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(x.to(dtype) if x is not None and x.dtype == torch.float32 else x for x in tensors)


@contextmanager
def without_autocast(device: str) -> Iterator[bool]:
    """Whether torch.autocast is on for a kind of device, which it is not inside."""
    was_on = torch.is_autocast_enabled(device)
    if not was_on:
        yield False
        return
    with torch.autocast(device, enabled=False):
        yield True


def casts_of(operands: Operands, kernels: bool) -> Casts:
    """Which operands of a checked call are made anew in each call: tensors of other floats, lengths
    and tables of int64, or of entries that do not follow each other. kernels: whether these serve
    it, which beside FP8 operands take a bias of one dtype."""
    q, *_ = operands
    assert q is not None  # the operation's schema
    found = []
    for place, tensor in enumerate(operands):
        if tensor is None:
            continue
        dtype = dtype_of(INPUTS[place], tensor, q.dtype)
        if INPUTS[place] == "bias" and kernels and is_fp8(q.dtype):
            dtype = None if tensor.dtype == _BIAS else _BIAS
        if INPUTS[place] in _INTEGERS:
            apart = not (surely(tensor.stride(-1), 1) or surely(tensor.shape[-1], 1))
            dtype = torch.int32 if apart or tensor.dtype != torch.int32 else None
        if dtype is not None:
            found.append((place, dtype))
    return tuple(found)


def cast(operands: Operands, casts: Casts) -> tuple[Tensor | None, ...]:
    """The operands with those that `casts` names in other dtypes."""
    changed = [*operands]
    made: dict[int, Tensor] = {}  # a table may be that of K and V
    for place, dtype in casts:
        tensor = operands[place]
        assert tensor is not None  # as when the casts were found
        if id(tensor) not in made:
            integer = not tensor.is_floating_point()
            made[id(tensor)] = (
                tensor.to(dtype).contiguous() if integer else saturated(tensor, dtype)
            )
        changed[place] = made[id(tensor)]
    return tuple(changed)
