"""Builder of programs, an operation at a time: values, captured tensors and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....fragments.building import Operations
from ....fragments.program import ELEMENTS


@dataclass
class View:
    """Part of a captured tensor: an index for each of its axes, None for one that is left."""

    capture: int
    indices: list[str | None]


@dataclass
class Builder(Operations):
    """Operations, and the captured tensors that they read.

    origins: where captures come from, as `view` is told. merged: whether tensors that are not one
    object were found to be one part of memory, which they need not be in another call.
    """

    captures: list[Tensor] = field(default_factory=list)
    origins: list[Any] = field(default_factory=list)
    merged: bool = False

    def view(self, tensor: Tensor, origin: Any) -> View:
        """A captured tensor, in a dtype and of a rank that kernels read. origin: what it is in a
        trace."""
        like = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        has_memory = tensor.device.type != "meta"
        for place, each in enumerate(self.captures):
            same = (each.data_ptr(), each.shape, each.stride(), each.dtype) == like and has_memory
            if each is tensor or (same and not (each.requires_grad or tensor.requires_grad)):
                self.merged |= each is not tensor
                return View(place, [None] * max(1, tensor.ndim) if tensor.ndim else ["i:0"])
        self.captures.append(tensor)
        self.origins.append(origin)
        return View(len(self.captures) - 1, [None] * tensor.ndim if tensor.ndim else ["i:0"])

    def learns(self, load: str) -> bool:
        """Whether a value is a number of a captured tensor that requires a gradient."""
        capture, *_ = list(self.operations)[int(load[1:])].args
        return self.captures[int(capture)].requires_grad

    def load(self, view: View) -> str:
        dtype = element_of(self.captures[view.capture])
        _, type_ = ELEMENTS[dtype]
        indices = [each for each in view.indices if each is not None]
        return self.emit("load", type_, str(view.capture), *indices)


@cache
def _read_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels read a captured tensor."""
    if dtype.is_floating_point:
        return torch.float32
    return dtype if str(dtype).removeprefix("torch.") in ELEMENTS else torch.int32


def element_of(tensor: Tensor) -> str:
    """The name of the dtype in which kernels read a captured tensor."""
    return str(_read_as(tensor.dtype)).removeprefix("torch.")


def capture_of(tensor: Tensor) -> tuple[str, int, str]:
    """The words of a program for a captured tensor, as `Program` has them."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    farthest = sum((size - 1) * step for size, step in axes)
    return element_of(tensor), max(1, tensor.ndim), "i" if farthest < 1 << 31 else "l"


def as_read(tensor: Tensor) -> Tensor:
    """A captured tensor as kernels read it: in such a dtype, and with an axis."""
    wanted = _read_as(tensor.dtype)
    tensor = tensor.detach() if tensor.requires_grad else tensor
    tensor = tensor if tensor.dtype == wanted else tensor.to(wanted)
    return tensor if tensor.ndim else tensor[None]


def type_of(dtype: torch.dtype) -> str:
    """The type of a value of a dtype."""
    if dtype.is_floating_point:
        return "f"
    return {torch.bool: "b", torch.int64: "l"}.get(dtype, "i")
