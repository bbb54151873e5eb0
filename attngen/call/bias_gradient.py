"""The gradient of a bias, as kernels write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SpecError
from ..runtime.load import LoadedKernel
from ..runtime.run_time import Extent
from .bias import sizes_of
from .gradient_kernels import adds_bias, sums_bias
from .tensors import Described, TensorDesc, dtype_name

MOST_ADDED = 8  # terms of a gradient that are added in 16 bits, each sum rounded


class Scores(NamedTuple):
    """Sizes of a call's scores: its sequences, query heads, queries and keys."""

    sequences: int
    heads: int
    queries: int
    keys: int


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
        """Numbers that kernels have of it."""
        return {"dbias_terms": self.terms, "dbias_tiles": self.tiles} if self.terms else {}

    @property
    def counts_bytes(self) -> int:
        """Bytes of a workspace that must be zero: two counts a tile."""
        return 8 * self.tiles if self.terms > 1 else 0


@dataclass(frozen=True)
class BiasGradient:
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
        """Numbers that its kernel has of it."""
        batches, heads, rows, columns = sizes_of(self.shape)
        if self.sums:
            batches, heads, columns = self.sums
        sizes = {"batches": batches, "heads": heads, "rows": rows, "columns": columns}
        sizes["sums_rows"] = int(self.sums is not None)
        return {f"dbias_{name}": size for name, size in sizes.items()}

    @property
    def summed(self) -> tuple[int, ...]:
        """Axes of the sums over which the gradient is their sum."""
        batches, heads, *_ = sizes_of(self.shape)
        return tuple(axis for axis, size in enumerate((batches, heads)) if size == 1)

    def new(self, bias: Described) -> TensorDesc:
        """The tensor that its kernel fills."""
        if self.sums:
            return TensorDesc.contiguous(self.sums, "float32")
        return TensorDesc.contiguous(self.shape, dtype_name(bias))


def fused_by(
    kernels: Sequence[LoadedKernel], gradient: BiasGradient, full: Scores, scaled: bool
) -> FusedBiasGradient:
    """How one of these kernels adds the gradient in a call of these scores: where the bias has all
    heads, the gradient few terms, and the copy engine reaches it."""
    batches, heads, _, columns = sizes_of(gradient.shape)
    main = next((each.kernel for each in kernels if adds_bias(each)), None)
    terms = full.sequences // batches
    if main is None or gradient.sums or heads != full.heads or columns % 8 or terms > MOST_ADDED:
        return FusedBiasGradient()
    tiles = full.sequences * full.heads * -(-full.keys // main.tile_rows)
    return FusedBiasGradient(terms, tiles, scaled)


def considered(
    kernels: Sequence[LoadedKernel], gradient: BiasGradient | None, fused: FusedBiasGradient
) -> tuple[LoadedKernel, ...]:
    """The kernels without those that make the gradient of another bias beside dK and dV."""
    summed = gradient is not None and gradient.sums is not None
    fitting = (each for each in kernels if fused.terms or not adds_bias(each))
    return tuple(each for each in fitting if summed or not sums_bias(each))


def column_violations(bias: Described, keys: int) -> Iterator[str]:
    """Why kernels have no gradient of a bias: it has one column for all keys."""
    *_, columns = sizes_of(bias.shape)
    if columns == 1 < keys:
        yield (
            f"bias {list(bias.shape)} has one column for {keys} keys, and kernels no gradient "
            "of that: pass bias.expand(…, s_kv), or detach it"
        )


def gradient_of(bias: Described, full: Scores) -> BiasGradient:
    """How the gradient of a bias is made in a call of these scores.

    Raises: SpecError where the bias has one column for all keys.
    """
    if reasons := [*column_violations(bias, full.keys)]:
        raise SpecError(reasons)
    _, _, rows, columns = sizes_of(bias.shape)
    sums = (full.sequences, full.heads, columns) if rows == 1 < full.queries else None
    return BiasGradient(tuple(bias.shape), sums)
