"""Program check: every number, name and reference of a launch program, whoever made it, so that
nothing crafted makes a launcher write, or the driver read, out of bounds.

A cubin is code, which nobody can check; a bundle is taken from whom one trusts. This is about the
host: parameters are packed by these offsets, grids and workspaces worked out by these numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import get_args

from ..spec.problem import DTYPE_BYTES
from ..targets.target import DEFAULT, TARGETS
from .program import FIELD_BYTES, SCHEMA_VERSION, Binary, KernelEntry, TensorMapRecipe, Workspace

MOST_PARAMS_BYTES = 4096  # that a launch hands over
MOST_HEAD_DIM = 1024
MAPS = ("tensor_map", "sequence_map", "page_map")
TENSORS = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv", "bias", "dbias")
MAP_DTYPES = ("bf16", "fp16", "e4m3", "e5m2")
L2_BYTES = (64, 128, 256)
BITS = ("mask_rows", "mask_columns")  # workspaces that an operand may hold instead
_ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}[a-z]?")  # loading it asks for the device's
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Field of a description → the least and the most that it may be.
_LIMITS = {
    "threads": (32, 1024),
    "smem_bytes": (0, max(each.cta_smem_bytes for each in TARGETS.values())),
    "tile_rows": (1, 1 << 16),
    "params_bytes": (0, MOST_PARAMS_BYTES),
    "kv_group_bytes": (0, 1 << 40),
    "group_heads": (1, 1 << 20),
    "tail_share": (0, 1 << 16),
    "row_block": (0, 1 << 16),
    "block_ctas": (1, 1 << 10),
    "cta_blocks": (1, 1 << 16),
    "dq_floats": (0, 1 << 24),
    "dkv_floats": (0, 1 << 24),
    "turned_bytes": (0, 1 << 16),
    "turned_key_bytes": (0, 1 << 16),
    "block_keys": (0, 1 << 16),
    "ctas": (1, 32),
    "part_floats": (0, MOST_HEAD_DIM),
}
# Grid → fields that it divides by, and that must be positive.
_DIVISORS = {"row_blocks": ("row_block",), "splits": ("block_keys", "part_floats")}


def mistakes_of(binary: Binary) -> list[str]:
    """Why the launch program must not be used: all reasons; none where it may be."""
    found = []
    if binary.schema != SCHEMA_VERSION:
        found.append(f"schema {binary.schema}, not {SCHEMA_VERSION}")
    if not _ARCHITECTURE.fullmatch(binary.arch):
        found.append(f"arch {binary.arch[:80]!r} is no architecture, such as {DEFAULT.name}")
    dims = {name: getattr(binary.problem, name) for name in ("head_dim_qk", "head_dim_v")}
    found += [
        f"{name} {dim} is not in 1 … {MOST_HEAD_DIM}"
        for name, dim in dims.items()
        if not 1 <= dim <= MOST_HEAD_DIM
    ]
    found += [
        f"{name} is no sha256"
        for name in ("source_sha256", "cubin_sha256")
        if not _SHA256.fullmatch(getattr(binary, name))
    ]
    if min(vars(binary.resources).values()) < 0:
        found.append("resources are below 0")
    return [*found, *_mistakes_of_kernel(binary.kernel)]


def _mistakes_of_kernel(kernel: KernelEntry) -> Iterator[str]:
    if not _SYMBOL.fullmatch(kernel.entry):
        yield f"entry {kernel.entry[:80]!r} is no symbol"
    for name, (least, most) in _LIMITS.items():
        if not least <= getattr(kernel, name) <= most:
            yield f"{name} {getattr(kernel, name)} is not in {least} … {most}"
    if kernel.threads % 32:
        yield f"threads {kernel.threads} are no whole warps"
    if not (math.isfinite(kernel.busy_ctas) and 0 < kernel.busy_ctas <= 32):
        yield f"busy_ctas {kernel.busy_ctas} is not above 0, and at most 32"
    for name in _DIVISORS.get(kernel.grid, ()):
        if getattr(kernel, name) < 1:
            yield f"{name} {getattr(kernel, name)} beside grid {kernel.grid!r}: at least 1"
    for name in _repeated(kernel.workspace):
        yield f"workspace {name} is there more than once"
    yield from _mistakes_of_fields(kernel)
    yield from _mistakes_of_maps(kernel)


def _mistakes_of_fields(kernel: KernelEntry) -> Iterator[str]:
    """The parameters: each aligned and behind the one before it, all of them within the block."""
    for name in _repeated(field.name for field in kernel.fields):
        yield f"field {name} is there more than once"
    end = 0
    for field in kernel.fields:
        size, alignment = FIELD_BYTES[field.type]
        if not _NAME.fullmatch(field.name):
            yield f"field {field.name[:80]!r} is no name of a parameter"
        if field.offset < end:
            yield f"field {field.name} at {field.offset} begins before {end}, where it may"
        if field.offset % alignment:
            yield f"field {field.name} at {field.offset} is not at a multiple of {alignment}"
        end = max(end, field.offset + size)
        unset = field.type == "ptr" and field.name not in kernel.workspace
        if unset and field.name in get_args(Workspace) and field.name not in BITS:
            yield f"field {field.name} is a workspace that the kernel does not name"
    if end > kernel.params_bytes:
        yield f"fields end at {end}, beyond the {kernel.params_bytes} bytes of params_bytes"


def _mistakes_of_maps(kernel: KernelEntry) -> Iterator[str]:
    """The recipes: one for each parameter that is a map, of what the copy engine can bring."""
    types = {field.name: field.type for field in kernel.fields}
    mapped = [recipe.field for recipe in kernel.tensor_maps]
    for name in _repeated(mapped):
        yield f"tensor map {name} is there more than once"
    for name in sorted(name for name, type_ in types.items() if type_ in MAPS):
        if name not in mapped:
            yield f"field {name} has no tensor map"
    for recipe in kernel.tensor_maps:
        where = f"tensor map {recipe.field[:80]!r}"
        if recipe.tensor not in TENSORS:
            yield f"{where}: tensor {recipe.tensor[:80]!r} is not one of {TENSORS}"
        elif types.get(recipe.field) != (wanted := _type_of(kernel, recipe)):
            yield f"{where}: its field is no {wanted}"
        if recipe.dtype not in MAP_DTYPES:
            yield f"{where}: dtype {recipe.dtype[:80]!r} is not one of {MAP_DTYPES}"
        elif not 0 < recipe.box_cols * DTYPE_BYTES[recipe.dtype] <= 128:
            yield f"{where}: box_cols {recipe.box_cols} are not 1 to 128 bytes"
        elif recipe.box_cols * DTYPE_BYTES[recipe.dtype] % 16:
            yield f"{where}: box_cols {recipe.box_cols} are no multiple of 16 bytes"
        if not 1 <= recipe.box_rows <= 256:
            yield f"{where}: box_rows {recipe.box_rows} is not in 1 … 256"
        if recipe.l2_bytes not in L2_BYTES:
            yield f"{where}: l2_bytes {recipe.l2_bytes} is not one of {L2_BYTES}"


def _type_of(kernel: KernelEntry, recipe: TensorMapRecipe) -> str:
    """The type of the parameter that holds the map, as runtime/geometry.py makes it."""
    if recipe.paged:
        return "page_map"
    of_keys = recipe.tensor in ("k", "v", "dk", "dv")
    varies = (kernel.kv_seq if of_keys else kernel.q_seq) != "dense"
    return "sequence_map" if varies and not recipe.spare else "tensor_map"


def _repeated(names: Iterable[str]) -> list[str]:
    counts = Counter(names)
    return sorted(name for name, count in counts.items() if count > 1)
