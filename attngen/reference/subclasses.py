"""Tensors whose storage does not hold their numbers: what they are, and what to pass instead."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

_PLAIN = (Tensor, torch.nn.Parameter)
# Classes of PyTorch by module and name, not imported for this: what they are, and the way out.
_BY_NAME = {
    ("torch.nn.attention.bias", "CausalBias"): (
        "is a CausalBias, which has no numbers. Pass it as attn_mask."
    ),
    ("torch.masked.maskedtensor.core", "MaskedTensor"): (
        "is a MaskedTensor, whose masked entries have no numbers. Pass its get_data(), and what "
        "is to be hidden as attn_mask."
    ),
}


def unreadable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be read as numbers, to be put behind its name; None where it can.

    A subclass with a `__torch_dispatch__` of its own gets each operation and answers for itself.
    """
    if torch.compiler.is_compiling():
        return None
    kind = type(tensor)
    if kind not in _PLAIN:
        if isinstance(tensor, UninitializedTensorMixin):
            return "has no numbers yet: it is a lazy module's. Run that module once."
        for base in kind.__mro__:
            if (reason := _BY_NAME.get((base.__module__, base.__name__))) is not None:
                return reason
    if tensor.layout != torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        if tensor.is_nested and name == "jagged":
            return None  # whether it may be nested depends on the argument
        return f"needs a dense tensor; its layout is {name}. Pass its to_dense()."
    answers = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if answers or tensor.device.type not in ("cpu", "cuda"):
        return None
    return _freed(tensor)


def _freed(tensor: Tensor) -> str | None:
    """Say that memory is too small for a tensor's sizes, as of a parameter that a sharding keeps
    elsewhere."""
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a transform's, which has none
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum([(size - 1) * step for size, step in steps])
    needed = (last + 1) * tensor.element_size() if tensor.numel() else 0
    if held >= needed:
        return None
    return (
        f"has {held} bytes of storage and sizes {list(tensor.shape)}, which need {needed}: its "
        "memory was freed. Gather or restore it before the call."
    )
