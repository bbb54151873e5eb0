"""Binary: a compiled kernel with everything that a launch needs to know, and no compiler.

`launch` fills the parameter struct from run-time values by the recipes given here; neither it
nor a bundle ever looks at a Problem's plan or at a template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import Problem

SCHEMA_VERSION = 1

FieldType = Literal["i32", "f32", "i64", "ptr", "tensor_map"]
FIELD_BYTES: dict[str, tuple[int, int]] = {  # size, alignment
    "i32": (4, 4),
    "f32": (4, 4),
    "i64": (8, 8),
    "ptr": (8, 8),
    "tensor_map": (128, 64),
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

    A box is `box_cols` elements of the head dim by `box_rows` positions, 128-byte swizzled;
    elements outside the tensor read as zero and are not written.
    """

    field: str
    tensor: str
    dtype: str
    box_cols: int
    box_rows: int


@dataclass(frozen=True)
class KernelEntry:
    """One launch of the program: a persistent grid over `tiles`, at most one CTA an SM.

    `kv_group_bytes`, `group_heads` and `tail_share` order the tiles (see arch.base.Schedule).
    """

    entry: str
    threads: int
    smem_bytes: int
    tile_m: int
    params_bytes: int
    fields: tuple[Field, ...]
    tensor_maps: tuple[TensorMapRecipe, ...]
    grid: Literal["persistent_tiles"]
    workspace: tuple[Literal["tile_counter"], ...]
    kv_group_bytes: int
    group_heads: int
    tail_share: int


@dataclass(frozen=True)
class Resources:
    """The compiler's report: registers at launch, highest register used, spills, cubin size."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    cubin_bytes: int


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
