"""Biases as kernels read them, and the gradient that they write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...call.bias import sizes_of
from ...errors import SpecError
from ...runtime.load import LoadedKernel
from ...runtime.run_time import Extent
from ...spec.attention_spec import is_boxed
from .gradient_kernels import adds_bias

MOST_ADDED = 8  # terms of a gradient that are added in 16 bits, each sum rounded
MOST_SPREAD = 2  # elements of memory that a copy may take for each of the bias


def readable(bias: Tensor) -> Tensor:
    """The 16-bit bias [.., s_q, s_kv], or, where it has several rows and the copy engine could not
    read it, a copy that it can, made on the current stream: a warp of the forward that copied them
    would take ten times as long. What is broadcast is copied once. A small part of a larger tensor
    that only begins off a multiple of 16 bytes is left to that warp: a copy has its strides."""
    if bias.ndim < 2 or 1 in bias.shape[-2:] or 0 in bias.stride()[-2:]:
        return bias
    in_place = is_boxed(bias.shape, bias.stride(), bias.element_size())
    if in_place and bias.data_ptr() % 16 == 0:
        return bias
    whole = bias[tuple(slice(1) if step == 0 else slice(None) for step in bias.stride())]
    strides = whole.stride()  # kept where it only begins elsewhere: so are launches, by strides
    if in_place:
        steps = zip(whole.shape, strides, strict=True)
        if sum((size - 1) * step for size, step in steps) >= MOST_SPREAD * whole.numel():
            return bias
    else:
        *outer, columns = whole.shape
        strides = torch.empty(*outer, -(-columns // 8) * 8, device="meta").stride()
    copy = torch.empty_strided(whole.shape, strides, dtype=bias.dtype, device=bias.device)
    return copy.copy_(whole).expand(bias.shape)


@dataclass(frozen=True)
class FusedBiasGradient:
    """How the kernel that makes dK and dV makes the gradient of a bias, too: from the dS of `terms`
    sequences each, in their order, 0 where it does not; `tiles` of keys of all heads and
    sequences; `scaled`: its dS are multiplied by the scale."""

    terms: int = 0
    tiles: int = 0
    scaled: bool = False

    @property
    def numbers(self) -> dict[str, int | float]:
        """What kernels know of it."""
        return {"dbias_terms": self.terms, "dbias_tiles": self.tiles} if self.terms else {}

    @property
    def counts_bytes(self) -> int:
        """Those of a workspace that must be zero: two counts a tile."""
        return 8 * self.tiles if self.terms > 1 else 0


def added_of(
    kernels: Sequence[LoadedKernel],
    gradient: Gradient,
    full: tuple[int, int, int, int],
    scaled: bool,
) -> FusedBiasGradient:
    """How one of these kernels adds the gradient in a call of so many sequences, heads, queries and
    keys: where the bias has all heads, the gradient few terms, and the copy engine reaches it."""
    batches, heads, _, columns = sizes_of(gradient.shape)
    main = next((each.kernel for each in kernels if adds_bias(each)), None)
    terms = full[0] // batches
    if main is None or gradient.sums or heads != full[1] or columns % 8 or terms > MOST_ADDED:
        return FusedBiasGradient()
    return FusedBiasGradient(terms, full[0] * full[1] * -(-full[3] // main.tile_rows), scaled)


@dataclass(frozen=True)
class Gradient:
    """How a kernel leaves the gradient of a bias: as it is, contiguous, or, where the bias is one
    row for all queries, float32 sums [b, h, s_kv] of them for each sequence and head."""

    shape: tuple[int, ...]
    sums: tuple[int, int, int] | None

    @property
    def extent(self) -> Extent:
        """Its sizes and strides, where it has rows."""
        batches, heads, rows, columns = sizes_of(self.shape)
        strides = (heads * rows * columns, columns, rows * columns)
        return Extent(batches, rows, heads, columns, *strides)

    @property
    def numbers(self) -> dict[str, int | float]:
        """What its kernel knows of it."""
        batches, heads, rows, columns = sizes_of(self.shape)
        if self.sums:
            batches, heads, columns = self.sums
        sizes = {"batches": batches, "heads": heads, "rows": rows, "columns": columns}
        sizes["sums_rows"] = int(self.sums is not None)
        return {f"dbias_{name}": size for name, size in sizes.items()}

    def new(self, bias: Tensor) -> Tensor:
        """A new tensor for its kernel to fill."""
        if self.sums:
            return bias.new_empty(self.sums, dtype=torch.float32)
        return bias.new_empty(self.shape)

    def finish(self, made: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient, of what its kernel made."""
        if not self.sums:
            return made
        reduced = [axis for axis, size in enumerate(sizes_of(self.shape)[:2]) if size == 1]
        total = made.sum(reduced, keepdim=True) if reduced else made
        return total.to(dtype).unsqueeze(2).view(self.shape)


def column_violations(bias: Tensor, keys: int) -> Iterator[str]:
    """Why kernels have no gradient of a bias: it has one column for all keys."""
    if sizes_of(bias.shape)[3] == 1 < keys:
        yield (
            f"bias {list(bias.shape)} has one column for {keys} keys, and kernels no gradient "
            "of that: pass bias.expand(…, s_kv), or detach it"
        )


def gradient_of(bias: Tensor, full: tuple[int, int, int, int]) -> Gradient:
    """How the gradient of a bias is made in a call of so many sequences, heads, queries and keys.

    Raises: SpecError where the bias has one column for all keys.
    """
    if reasons := [*column_violations(bias, full[3])]:
        raise SpecError(reasons)
    _, _, rows, columns = sizes_of(bias.shape)
    sums = (full[0], full[1], columns) if rows == 1 < full[2] else None
    return Gradient(tuple(bias.shape), sums)
