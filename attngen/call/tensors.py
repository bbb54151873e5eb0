"""Tensors as a call sees them: without the library that holds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BYTES = {
    **dict.fromkeys(("bool", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64"), 8),
}
"""Bytes of an element, by the names that torch, JAX and NumPy have for a dtype."""
FP8 = ("float8_e4m3fn", "float8_e5m2")


class Described(Protocol):
    """Whatever says its shape, strides and dtype: a `TensorDesc`, or a tensor of torch."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def stride(self) -> tuple[int, ...]: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...


@dataclass(frozen=True)
class TensorDesc:
    """A tensor of any library.

    shape: sizes of its axes; strides: in elements; dtype: its name, as in `BYTES`; device: where it
    is, as its library names that; address: of its first element, 0 where nobody has to know it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Any = None
    address: int = 0

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: str, device: Any = None) -> TensorDesc:
        """A tensor whose rows follow each other, at no address."""
        return cls(tuple(shape), contiguous_strides(shape), dtype, device)

    @classmethod
    def ordered(
        cls, shape: Sequence[int], order: str, dtype: str, device: Any = None
    ) -> TensorDesc:
        """A tensor without gaps whose axes lie in memory in an order, the outermost first, as
        digits; contiguous where that is empty."""
        return cls(tuple(shape), ordered_strides(shape, order), dtype, device)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """Elements from one to the next along each axis."""
        return self.strides

    def element_size(self) -> int:
        """Bytes of an element; 0 of a dtype that no call has."""
        return BYTES.get(self.dtype, 0)

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def unbind(self, axis: int) -> tuple[TensorDesc, ...]:
        """The parts along an axis, without it, each at its own address."""
        axis %= self.ndim
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        strides = self.strides[:axis] + self.strides[axis + 1 :]
        step = self.strides[axis] * self.element_size()
        return tuple(
            TensorDesc(shape, strides, self.dtype, self.device, self.address + place * step)
            for place in range(self.shape[axis])
        )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of rows that follow each other, as torch and NumPy have them."""
    sizes = [max(size, 1) for size in shape]
    return tuple([math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))])


def ordered_strides(shape: Sequence[int], order: str) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without gaps, as `TensorDesc.ordered` has them."""
    if not order:
        return contiguous_strides(shape)
    axes = [int(axis) for axis in order]
    steps = dict(zip(axes, contiguous_strides([shape[axis] for axis in axes]), strict=True))
    return tuple([steps[axis] for axis in range(len(axes))])


def is_contiguous(tensor: Described) -> bool:
    """Whether the elements of a tensor follow each other."""
    steps = zip(tensor.shape, tensor.stride(), contiguous_strides(tensor.shape), strict=True)
    return not tensor.numel() or all([n == 1 or step == wanted for n, step, wanted in steps])


def named(tensor: Described) -> str:
    """A tensor for a message, as `float32 [2, 3]`."""
    return f"{dtype_name(tensor)} {list(tensor.shape)}"


def name_of(dtype: object) -> str:
    """The name of a dtype of torch, JAX or NumPy, as in `BYTES`."""
    return str(dtype).removeprefix("torch.")


def dtype_name(tensor: Described) -> str:
    """The name of a tensor's dtype, as in `BYTES`."""
    return str(tensor.dtype).removeprefix("torch.")


def is_described(value: object) -> bool:
    """Whether a value says its shape, strides and dtype."""
    return hasattr(value, "stride") and hasattr(value, "dtype")


def is_fp8(tensor: Described) -> bool:
    """Whether a tensor has one of the two 8-bit formats."""
    return dtype_name(tensor) in FP8
