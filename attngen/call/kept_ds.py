"""Gradients of scores that a backward keeps in memory, so that dQ is one product of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..runtime.load import LoadedKernel
from ..runtime.run_time import Extent
from .room import bytes_named

# Of all heads of a launch. Further heads have launches of their own; of heads with more dS dQ has a
# kernel that makes these anew.
MOST_BYTES = 1280 << 20
VARIABLE = "ATTNGEN_KEPT_MEGABYTES"  # says another limit
BLOCK_KEYS = 64
ROW_BYTES = 128  # of a block's keys, in 16 bits


@dataclass(frozen=True)
class Round:
    """Some heads of keys whose dS are in memory at once: how many, and those of rounds before."""

    heads: int
    before: int

    @property
    def numbers(self) -> dict[str, int]:
        """Numbers that its kernels have of it."""
        return {"round_heads": self.heads, "heads_before": self.before}


@dataclass(frozen=True)
class KeptGradients:
    """dS in memory: rows of a head that have room, a multiple of those of a tile of dQ; bytes of a
    round; and the rounds, of which there are none where no kernel reads dS."""

    rows: int
    bytes: int
    rounds: tuple[Round, ...]

    @property
    def numbers(self) -> dict[str, int]:
        """Numbers by which workspaces are laid out and kernels find dS."""
        return {"kept_rows": self.rows, "ds_bytes": self.bytes} if self.rounds else {}


NOTHING = KeptGradients(0, 0, ())


def most_bytes() -> int:
    """The bytes that dS may take. Raises: SpecError where the environment names no number."""
    return bytes_named(VARIABLE, MOST_BYTES)


def reads_ds(each: LoadedKernel) -> bool:
    """Whether the kernel makes dQ of dS that another one has left in memory."""
    return "d_s" in each.kernel.workspace and each.kernel.tile_axis == "q"


def makes_ds(each: LoadedKernel) -> bool:
    """Whether the kernel leaves dS in memory where a call asks for it."""
    return "d_s" in each.kernel.workspace and each.kernel.tile_axis == "kv"


def considered(
    kernels: tuple[LoadedKernel, ...], extents: Mapping[str, Extent]
) -> tuple[LoadedKernel, ...]:
    """The kernels without that which reads dS, where those of one head take too much memory."""
    reader = next(filter(reads_ds, kernels), None)
    if reader is None or _bytes_of_head(reader, extents) <= most_bytes():
        return kernels
    return tuple(each for each in kernels if not reads_ds(each))


def kept_by(kernels: Sequence[LoadedKernel], extents: Mapping[str, Extent]) -> KeptGradients:
    """The dS that these kernels, which a call launches, keep in memory."""
    reader = next(filter(reads_ds, kernels), None)
    if reader is None:
        return NOTHING
    k, of_head = extents["k"], _bytes_of_head(reader, extents)
    heads = k.batch * k.heads
    count = -(-heads // (most_bytes() // of_head))
    share = -(-heads // count)
    rounds = tuple(Round(min(share, heads - i), i) for i in range(0, heads, share))
    return KeptGradients(_rows_of(reader, extents), share * of_head, rounds)


def in_rounds(
    kernels: Sequence[LoadedKernel], kept: KeptGradients
) -> Iterator[tuple[LoadedKernel, Mapping[str, int]]]:
    """The kernels in the order of their launches, with the numbers of each: those that make or read
    dS once a round, one after the other."""
    shared = [each for each in kernels if makes_ds(each) or reads_ds(each)]
    for each in kernels:
        if not kept.rounds or each not in shared:
            yield each, {}
        elif makes_ds(each):
            yield from ((each, part.numbers) for part in kept.rounds for each in shared)


def _rows_of(reader: LoadedKernel, extents: Mapping[str, Extent]) -> int:
    rows = reader.kernel.tile_rows
    return -(-extents["q"].seq // rows) * rows


def _bytes_of_head(reader: LoadedKernel, extents: Mapping[str, Extent]) -> int:
    """Bytes of dS of a head of keys, with all query heads that share it."""
    q, k = extents["q"], extents["k"]
    blocks = -(-k.seq // BLOCK_KEYS) * (q.heads // k.heads)
    return max(1, blocks * _rows_of(reader, extents) * ROW_BYTES)
