"""Tensors and dtypes as refusals name them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def shape_of(tensor: object) -> str:
    """A tensor for a message, as `float32 [2, 3]`; anything else as itself."""
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return f"{names([tensor.dtype])} {list(tensor.shape)}"


def names(dtypes: Iterable[torch.dtype], separator: str = ", ") -> str:
    """Dtypes for a message, as `float16, bfloat16`."""
    return separator.join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def kind_of(value: object) -> str:
    """A value for a message: short ones as they are, of others their type."""
    text = repr(value)
    if isinstance(value, Tensor) or len(text) > 40 or "\n" in text:
        return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return text
