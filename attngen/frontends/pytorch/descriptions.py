"""Descriptions of torch's tensors and devices, as calls below the front end know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from ...call.kernel_choice import Device
from ...call.tensors import BYTES, TensorDesc, name_of
from ...targets.target import assumed, of_capability

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BYTES}
"""Torch's dtypes by the names that descriptions have."""
_NAMES = {x: name_of(x) for x in vars(torch).values() if isinstance(x, torch.dtype)}


def described(tensor: Tensor) -> TensorDesc:
    """A tensor of which all is known but its values and its address."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return TensorDesc(shape, strides, _NAMES[tensor.dtype], tensor.device)


def all_described(tensors: Sequence[Tensor | None]) -> tuple[TensorDesc | None, ...]:
    """Descriptions of several tensors, in their order, None for none."""
    return tuple([None if x is None else described(x) for x in tensors])


def described_by_name(tensors: Mapping[str, Tensor | None]) -> dict[str, TensorDesc | None]:
    """Descriptions of several tensors, by their names, None for none."""
    return {name: None if x is None else described(x) for name, x in tensors.items()}


def device_of(device: torch.device) -> Device:
    """A device of torch's as calls know it."""
    return Device(str(device), device.index, device_arch(device))


def device_arch(device: torch.device) -> str | None:
    """The architecture whose kernels run on this device; None where there are none."""
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():  # fake tensors, traced here for another machine
        return assumed()
    ask = torch.cuda.get_device_capability
    target = of_capability(ask(device) if device.index is None else _capability_of(device, ask))
    return None if target is None else target.name


@cache
def _capability_of(device: torch.device, ask: Callable[..., tuple[int, int]]) -> tuple[int, int]:
    """The compute capability of a GPU, which stays what it is: asking takes microseconds."""
    return ask(device)
