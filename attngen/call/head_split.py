"""Backwards that give each query head of a group key tiles of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..runtime.load import LoadedKernel
from ..runtime.run_time import Extent, blocks_of


@dataclass(frozen=True)
class HeadSplit:
    """Tiles of query heads that share keys, each of which adds to the sums of its key head's dK and
    dV: the numbers of the kernels that make them and of the one that rounds the sums, and the
    floats of these. None of all that where a tile visits the queries of all heads of a group."""

    main: Mapping[str, int]
    rounding: Mapping[str, int]
    floats: int

    @property
    def numbers(self) -> dict[str, int | float]:
        """Numbers by which workspaces are laid out."""
        return {"dkv_floats": self.floats} if self.floats else {}


TOGETHER = HeadSplit({}, {}, 0)


def split_heads(
    kernels: Sequence[LoadedKernel], extents: Mapping[str, Extent], sequences: int
) -> HeadSplit:
    """The tiles of each query head, made by the `kernels` of a backward that can split heads."""
    main = next(each.kernel for each in kernels if each.kernel.dkv_floats)
    q, k = extents["q"], extents["k"]
    tiles = blocks_of(k, main.tile_rows, main.kv_seq, sequences)
    floats = main.dkv_floats * tiles * k.heads * k.batch
    parts = tiles * main.tile_rows // 64
    return HeadSplit({"key_group": q.heads // k.heads}, {"key_parts": parts}, floats)
