"""Run-time values: sizes and scalars of a call, tiles and workspaces that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..spec.problem import DTYPE_BYTES
from ..targets.target import Target
from .program import KernelEntry

UNBOUNDED = 1 << 30  # a window side without a bound
SCHEDULE_BYTES = 16  # of a sequence in a schedule, and of what stands before the first
MASK_AXES = ("rows", "columns")  # a packed mask has a row a query, or a row a key
LOG2_E = 1.4426950408889634
LEAST_NORMAL = 2.0**-126  # float32: a scale that is no number makes none of a hidden score
FEW_HEADS = 4  # under a window: more where L2 holds the queries of all heads of a group
FEW_SEQUENCES = 32  # whose order each CTA finds itself, without a schedule
MAX_SPLITS = 128  # as many weights has the kernel that combines them


class Extent(NamedTuple):
    """Sizes and strides (elements) of one operand, whatever its memory order."""

    batch: int
    seq: int
    heads: int
    dim: int
    stride_batch: int
    stride_seq: int
    stride_heads: int
    stride_dim: int = 1


@dataclass(frozen=True)
class Scalars:
    """Run-time values of one call: natural-domain scale, window sides in keys (UNBOUNDED where
    there is none), whether the diagonal is aligned to the bottom right; further parameters by their
    names, such as strides of tensors beside q, k and v; how many sequences there are, where a
    batch axis does not say so."""

    softmax_scale: float
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    bottom_right: bool = False
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    sequences: int | None = None


def smem_bytes_of(kernel: KernelEntry, share: int, target: Target) -> int:
    """Shared memory that a CTA asks for where each SM gets `share` of them. CTAs of a kernel that
    starts early would crowd on the SMs that are free first, had these room for more: up to 1.4
    times as long (measured in a stream), or 1 to 2 µs where parts of keys are joined."""
    crowds = kernel.dependent and kernel.ctas > share
    return target.smem_share(share) if crowds else kernel.smem_bytes


def heads_per_group(
    kernel: KernelEntry, extents: Mapping[str, Extent], window: int = UNBOUNDED
) -> int:
    """Heads that are worked on together, so that what their tiles share stays in L2: of query
    heads the keys and values, of key/value heads the queries, output gradients and sums of dQ.
    Where tiles in an order follow a window of so many keys, these are its queries; those of all
    heads of a group, while four fit, which are as fast as fewer."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    group_size = q.heads // k.heads
    if kernel.tile_axis == "kv":
        follows = window < q.seq and not kernel.tail_share
        rows = window if follows else q.seq * group_size
        bytes_per_row = (q.dim + v.dim) * 2 + q.dim * 4 * (kernel.dq_floats > 0)
        fitting = kernel.kv_group_bytes // max(1, rows * bytes_per_row)
        if follows:
            fitting = max(fitting // group_size, min(fitting, FEW_HEADS))
        return max(1, min(k.batch * k.heads, kernel.group_heads, fitting))
    element_bytes = next((DTYPE_BYTES[m.dtype] for m in kernel.tensor_maps if m.tensor == "k"), 2)
    bytes_per_head = max(1, k.seq * (k.dim + v.dim) * element_bytes)
    kv_heads = min(kernel.kv_group_bytes // bytes_per_head, kernel.group_heads // group_size)
    return max(1, min(q.batch * q.heads, group_size * max(1, kv_heads)))


def workspace_bytes(
    kernel: KernelEntry,
    q: Extent,
    sequences: int | None = None,
    splits: int = 1,
    numbers: Mapping[str, int | float] | None = None,
) -> dict[str, int]:
    """Bytes of each workspace that the kernel names. The kernels of one problem share them, 16-byte
    aligned; only `tile_counter` has to be zero before the first launch."""
    sequences = q.batch if sequences is None else sequences
    given = numbers or {}
    blocks = q.batch * q.heads * row_blocks(kernel, q, sequences)
    schedule = SCHEDULE_BYTES * schedule_entries(sequences)
    rows = splits * q.batch * q.heads * q.seq
    known = {
        "tile_counter": 4,
        "lse_log2": 4 * kernel.row_block * blocks,
        "d": 4 * kernel.row_block * blocks,
        "dq_acc": 4 * kernel.dq_floats * blocks,
        "dq_added": 0,
        "turns": 4 * blocks * kernel.tile_parts,
        "dbias_turns": 8 * int(given.get("dbias_tiles", 0)),
        "d_s": int(given.get("ds_bytes", 0)),
        "dkv_acc": 4 * int(given.get("dkv_floats", 0)),
        "o_parts": 4 * kernel.part_floats * rows if splits > 1 else 0,
        "lse_parts": 8 * rows if splits > 1 else 0,
        "row_sums": 8 * q.batch * q.heads * q.seq,
        "queries_turned": kernel.turned_bytes * blocks,
        "keys_turned": kernel.turned_key_bytes * int(given.get("key_tiles", 0)),
        "q_schedule": schedule,
        "kv_schedule": schedule,
        **{f"mask_{axis}": 4 * int(given.get(f"mask_{axis}_words", 0)) for axis in MASK_AXES},
    }
    return {name: known[name] for name in kernel.workspace}


def schedule_entries(sequences: int) -> int:
    """Entries of a schedule: one before the first, and two a sequence at most."""
    return 1 + 2 * sequences


def row_blocks(kernel: KernelEntry, q: Extent, sequences: int) -> int:
    """Blocks of a head's queries in the workspaces; 0 for a kernel that has none."""
    return blocks_of(q, kernel.row_block, kernel.q_seq, sequences) if kernel.row_block else 0


def row_tiles(kernel: KernelEntry, extents: Mapping[str, Extent], sequences: int) -> int:
    """Tiles of queries times heads of a group: of one sequence, or of all where they are packed."""
    q = extents["q"]
    rows = q._replace(seq=q.seq * (q.heads // extents["k"].heads))
    return blocks_of(rows, kernel.tile_rows, kernel.q_seq, sequences)


def blocks_of(extent: Extent, rows: int, sequence: str, sequences: int) -> int:
    """Blocks of so many rows along one head. Packed sequences begin anywhere, each in a block of
    its own: at most one more a sequence than the rows make, whatever the lengths."""
    if sequence == "packed":
        return extent.seq // rows + sequences
    return -(-extent.seq // rows)
