"""Biases as kernels know them: their strides, and how far they reach."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.run_time import UNBOUNDED, Extent
from .tensors import Described

AXES = ("batch", "head", "row", "column")


def sizes_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes of all four axes of a bias."""
    return (*(1,) * (len(AXES) - len(shape)), *shape)


def numbers_of(bias: Described) -> dict[str, int | float]:
    """Numbers that kernels have of a bias: strides, 0 where it is broadcast, and how many rows and
    columns it has, UNBOUNDED there."""
    strides = (*(0,) * (len(AXES) - bias.ndim), *bias.stride())
    numbers: dict[str, int | float] = {}
    for axis, size, stride in zip(AXES, sizes_of(bias.shape), strides, strict=True):
        numbers[f"bias_stride_{axis}"] = stride if size > 1 else 0
        numbers[f"bias_{axis}s"] = size if size > 1 else UNBOUNDED
    return numbers


def extent_of(bias: Described, sequences: int, heads: int) -> Extent:
    """Its sizes and strides as the copy engine takes them: of one row for all queries that row
    alone, of what is broadcast over sequences or heads one for each, none apart."""
    numbers = numbers_of(bias)
    batch, head, row, column = (int(numbers[f"bias_stride_{axis}"]) for axis in AXES)
    *_, rows, columns = sizes_of(bias.shape)
    return Extent(sequences, rows, heads, columns, batch, row, head, column)
