"""Backwards that give each query head of a group key tiles of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...runtime.load import LoadedKernel
from ...runtime.run_time import Extent, blocks_of, heads_per_group


@dataclass(frozen=True)
class HeadSplit:
    """Tiles of query heads that share keys, each of which adds to the sums of its key head's dK and
    dV: the numbers of the kernel that makes them and of the one that rounds the sums, and the
    floats of these. None of all that where a tile visits the queries of all heads of a group."""

    main: Mapping[str, int]
    rounding: Mapping[str, int]
    floats: int

    @property
    def numbers(self) -> dict[str, int | float]:
        """What the layout of workspaces knows of it."""
        return {"dkv_floats": self.floats} if self.floats else {}


TOGETHER = HeadSplit({}, {}, 0)


def split_heads(
    kernels: Sequence[LoadedKernel], extents: Mapping[str, Extent], sequences: int
) -> HeadSplit:
    """How each query head has tiles of its own, by the `kernels` of a backward that can part
    them."""
    main = next(each for each in kernels if each.kernel.dkv_floats)
    q, k = extents["q"], extents["k"]
    tiles = blocks_of(k, main.kernel.tile_rows, main.kernel.kv_seq, sequences)
    alone = {**extents, "k": k._replace(heads=q.heads)}
    numbers = {
        "key_group": q.heads // k.heads,
        "group_size": 1,
        "heads_kv": q.heads,
        "total_heads": q.heads * q.batch,
        "tiles": tiles * q.heads * q.batch,
        "heads_per_group": heads_per_group(main.kernel, alone),
    }
    floats = main.kernel.dkv_floats * tiles * k.heads * k.batch
    return HeadSplit(numbers, {"key_parts": tiles * main.kernel.tile_rows // 64}, floats)
