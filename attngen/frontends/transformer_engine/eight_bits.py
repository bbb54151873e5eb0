"""FP8 tensors and quantizers, known by what they have: TransformerEngine's as well as attngen's.

A tensor has `_data`, its numbers in FP8 or as uint8 beside `_fp8_dtype`, and `_scale_inv`, what one
of them stands for. A quantizer has `scale` and `amax`, float32 [1], `dtype`, and
`create_tensor_from_data`, which makes such a tensor of stored numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import SpecError
from ...reference.fp8 import is_fp8
from .names import TE_DType_To_Torch


class Stored(NamedTuple):
    """Numbers in FP8, and what one of them stands for, float32 [1]; None for 1."""

    data: Tensor
    descale: Tensor | None


def stored_of(x: Any) -> Stored | None:
    """The numbers of an FP8 tensor, also of one of PyTorch's own, which has no scale; None of
    others."""
    data = None if type(x) is Tensor else getattr(x, "_data", None)
    if isinstance(data, Tensor) and hasattr(x, "_scale_inv"):
        descale = x._scale_inv.reshape(-1)
        return Stored(data if is_fp8(data.dtype) else data.view(torch_dtype(x._fp8_dtype)), descale)
    return Stored(x, None) if isinstance(x, Tensor) and is_fp8(x.dtype) else None


def is_stored(x: Any) -> bool:
    """Whether a tensor holds FP8 numbers."""
    return stored_of(x) is not None


def torch_dtype(dtype: Any) -> torch.dtype:
    """PyTorch's dtype of TransformerEngine's number. Raises: KeyError."""
    return dtype if isinstance(dtype, torch.dtype) else TE_DType_To_Torch[int(dtype)]  # type: ignore[index]


def stores(quantizer: Any) -> bool:
    """Whether kernels store a result by this quantizer: one whose scale is known before."""
    return quantizer is not None and "Current" not in type(quantizer).__name__


def result_dtype(quantizer: Any, nominal: torch.dtype) -> torch.dtype:
    """The dtype of a result: the quantizer's where kernels store by it, else the nominal one."""
    return torch_dtype(quantizer.dtype) if stores(quantizer) else nominal


def note(quantizer: Any, *maxima: Tensor) -> None:
    """Have a quantizer, if there is one, know these magnitudes, float32 [1]."""
    if quantizer is not None:
        largest = torch.stack([*maxima]).amax(0).reshape(quantizer.amax.shape)
        torch.maximum(quantizer.amax, largest, out=quantizer.amax)


def wrapped(quantizer: Any, data: Tensor, nominal: torch.dtype) -> Tensor:
    """A result as its quantizer's FP8 tensor; as it is where that does not store."""
    if not stores(quantizer):
        return data
    made: Tensor = quantizer.create_tensor_from_data(data.view(torch.uint8), nominal)
    return made


def weights_scales(quantizer: Any) -> dict[str, Tensor]:
    """The scale of the softmax's weights and its reciprocal, by attngen's names; none for the
    definition's own."""
    if quantizer is None:
        return {}
    scale = quantizer.scale.reshape(1)
    return {"scale_s": scale, "descale_s": scale.reciprocal()}


def read(names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Stored]:
    """The numbers of tensors of these names. Raises: SpecError for each that has none in FP8."""
    found = {name: stored_of(x) for name, x in zip(names, tensors, strict=True)}
    if reasons := [
        f"{name} needs an FP8 tensor, as q is one. Quantise it."
        for name, x in found.items()
        if x is None
    ]:
        raise SpecError(reasons)
    return {name: x for name, x in found.items() if x is not None}


def descales(read_tensors: dict[str, Stored]) -> dict[str, Tensor | None]:
    """Scales that widen stored numbers, by the names of attngen's arguments."""
    return {f"descale_{name}": x.descale for name, x in read_tensors.items()}


def refuse_unstored(quantizers: Sequence[Any], fp8_backend: bool) -> None:
    """Raises: SpecError where a call of 16-bit tensors has what belongs to FP8."""
    named = {
        "FusedAttnBackend.FP8": fp8_backend,
        "quantizers": any(x is not None for x in quantizers),
    }
    if wrong := [name for name, given in named.items() if given]:
        raise SpecError(
            f"{' and '.join(wrong)}: they belong to FP8 tensors, and q is none. Quantise it."
        )
