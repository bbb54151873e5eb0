"""Binary: a compiled kernel with everything that a launch needs to know, and no compiler.

`launch` fills the parameter struct from run-time values by the recipes given here; neither it
nor a bundle ever looks at a Problem's plan or at a template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..spec.problem import Problem, Sequence

SCHEMA_VERSION = 3

FieldType = Literal["i32", "f32", "i64", "ptr", "tensor_map", "sequence_map", "page_map"]
FIELD_BYTES: dict[str, tuple[int, int]] = {  # size, alignment
    "i32": (4, 4),
    "f32": (4, 4),
    "i64": (8, 8),
    "ptr": (8, 8),
    "tensor_map": (128, 64),
    "sequence_map": (192, 64),  # with the units of its shift
    "page_map": (192, 64),  # with the boxes from a head to the next
}


@dataclass(frozen=True)
class Field:
    """One member of the kernel's parameter struct.

    `name` is also the run-time value of `launch` that fills it (`scale_log2`, `window_left`, the
    address of `lse`); tensor maps are filled by their recipes.
    """

    name: str
    type: FieldType
    offset: int


@dataclass(frozen=True)
class TensorMapRecipe:
    """How to encode one tensor map: a 4-D tensor (head_dim, seq, head, batch) in boxes.

    A box is `box_cols` elements of the head dim by `box_rows` positions, where `paged` by the
    largest power of two that divides these and the tensor's; 128-byte swizzled. Elements outside
    the tensor read as zero and are not written. What L2 lacks it fetches in pieces of `l2_bytes`.
    `spare`: the kernel can do without, and finds zeros where the copy engine cannot read it.
    """

    field: str
    tensor: str
    dtype: str
    box_cols: int
    box_rows: int
    paged: bool = False
    l2_bytes: int = 256
    spare: bool = False


Grid = Literal[
    "persistent_tiles",
    "persistent_pairs",
    "tiles",
    "row_blocks",
    "multiprocessors",
    "splits",
    "rows",
    "one",
]
Workspace = Literal[
    "tile_counter",
    "lse_log2",
    "d",
    "dq_acc",
    "dq_added",
    "turns",
    "dbias_turns",
    "dkv_acc",
    "d_s",
    "q_schedule",
    "kv_schedule",
    "mask_rows",
    "mask_columns",
    "o_parts",
    "lse_parts",
    "row_sums",
    "queries_turned",
    "keys_turned",
]


@dataclass(frozen=True)
class KernelEntry:
    """One launch of the program.

    `grid`: at most `ctas` CTAs an SM, which share the tiles, `block_ctas` parts of each; or one an
    SM, two of which are a cluster that shares a tile; or one for each tile; or `block_ctas` CTAs
    for each block of `row_block` queries of each head, or one for `cta_blocks` of them; or `ctas`
    an SM; or one for each split of the keys of `tile_rows` rows of a key/value head; or one for
    `tile_rows` rows of the output; or one in all.
    `dependent`: it may start before the kernel that it waits for has ended. `tile_axis` says
    whether a tile is `tile_rows` queries of a query head or as many keys of a key/value head;
    `kv_group_bytes`, `group_heads` and `tail_share` order the tiles (see arch.base.Schedule).
    `workspace`: device memory beside the operands, of run_time.workspace_bytes each; what one
    kernel of a problem leaves there the next ones read; `dq_added`, of no bytes, that all tiles
    have added to `dq_acc`. `dq_floats`: those of `dq_acc` for a block;
    `dkv_floats`: of `dkv_acc` for a tile of keys, where each query head may have its own.
    `turned_bytes`: of a block's queries and output gradients, transposed, `turned_key_bytes`: of
    the keys of a tile.
    `block_keys`: keys that a split takes at a time; `ctas`: CTAs that an SM holds; `busy_ctas`:
    those that keep its share of the memory busy; `part_floats`: of `o_parts` for a row.
    `q_seq`, `kv_seq`: the problem's; they decide how its tensor maps find a sequence.
    `orders_few`: it finds the order of few sequences itself, where it has no schedule.
    `no_lse`: it writes the output alone. `folds`: CTAs of more heads or sequences than a grid's
    second and third axis may have can all be in the first.
    """

    entry: str
    threads: int
    smem_bytes: int
    tile_rows: int
    params_bytes: int
    fields: tuple[Field, ...]
    tensor_maps: tuple[TensorMapRecipe, ...]
    grid: Grid
    workspace: tuple[Workspace, ...]
    kv_group_bytes: int = 0
    group_heads: int = 1
    tail_share: int = 0
    tile_axis: Literal["q", "kv"] = "q"
    row_block: int = 0
    block_ctas: int = 1
    cta_blocks: int = 1
    dq_floats: int = 0
    dkv_floats: int = 0
    q_seq: Sequence = "dense"
    kv_seq: Sequence = "dense"
    dependent: bool = False
    turned_bytes: int = 0
    turned_key_bytes: int = 0
    block_keys: int = 0
    ctas: int = 1
    busy_ctas: float = 1.0
    part_floats: int = 0
    orders_few: bool = False
    no_lse: bool = False
    folds: bool = False

    @property
    def tile_parts(self) -> int:
        """Parts in which CTAs draw a tile, and that have turns of their own at what they add to."""
        return self.block_ctas if self.grid == "persistent_tiles" else 1


@dataclass(frozen=True)
class Resources:
    """The compiler's report: registers at launch, highest register used, spills, cubin size."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    cubin_bytes: int

    @property
    def in_local_memory(self) -> str:
        """Describe what a thread keeps in local memory for want of registers; empty for nothing."""
        if not (self.spill_bytes or self.stack_bytes):
            return ""
        return f"{self.spill_bytes} bytes of spills, {self.stack_bytes} bytes of stack"


@dataclass(frozen=True)
class Binary:
    """A launch program: metadata, and the cubin beside it (`cubin` is not part of the JSON).

    `source_sha256` is the digest of the rendered source.
    """

    schema: int
    arch: str
    problem: Problem
    kernel: KernelEntry
    resources: Resources
    toolchain: str
    source_sha256: str
    cubin_sha256: str
