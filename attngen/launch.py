"""Launch: fill a kernel's parameters from shapes, strides and addresses, and start it.

Neither torch nor the compiler is known here: a tensor is an address with sizes and strides, a
stream is a number. Whatever depends on shapes alone is worked out once (`prepare`) and reused.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import LaunchError
from .load import LoadedKernel, checked, driver
from .problem import DTYPE_BYTES
from .program import KernelEntry, TensorMapRecipe

LENGTH_LIMIT = 1 << 30  # positions; masks add lengths and windows in 32 bits
UNBOUNDED = 1 << 30  # a window side without a bound
TMA_STRIDE_LIMIT = 1 << 40  # bytes
LOG2_E = 1.4426950408889634
GRID_LIMIT = 65535  # CTAs along the second and third axis
PARAMETER_LIMIT = 32764  # bytes, the driver's
MAPS_KEPT = 4096  # encoded tensor maps, 128 bytes each: as many as a large model's activations
_FORMATS = {"i32": "i", "f32": "f", "i64": "q", "ptr": "Q", "tensor_map": "128s"}
_ADDRESSED = ("ptr", "tensor_map")


class Extent(NamedTuple):
    """Sizes and strides (elements) of one operand, whatever its memory order."""

    batch: int
    seq: int
    heads: int
    dim: int
    stride_batch: int
    stride_seq: int
    stride_heads: int


@dataclass(frozen=True)
class Scalars:
    """Run-time values of one call: natural-domain scale, window sides in keys (UNBOUNDED where
    there is none), whether the diagonal is aligned to the bottom right; for q, k and v the strides
    of their descales over the batch and the key/value heads, in elements."""

    softmax_scale: float
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    bottom_right: bool = False
    descale_strides: tuple[tuple[int, int], ...] = ((0, 0),) * 3


@dataclass(frozen=True, eq=False)
class TensorMap:
    """What cuTensorMapEncodeTiled takes before and after the address of `tensor`."""

    tensor: str
    before: tuple[Any, ...]
    after: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch of one kernel for given shapes; only addresses are missing.

    values: one a parameter field, in their order; zero where an address decides, `pointers` and
    `maps` say which. start: what cuLaunchKernel takes before the stream.
    """

    loaded: LoadedKernel
    layout: struct.Struct
    values: tuple[int | float, ...]
    pointers: tuple[tuple[int, str], ...]
    maps: tuple[tuple[int, TensorMap], ...]
    start: tuple[Any, ...]


def prepare(loaded: LoadedKernel, extents: dict[str, Extent], scalars: Scalars) -> Prepared:
    """Everything about a launch that the tensors' addresses do not change.

    extents: those of q, k, v and o, for a backward of d_o, dq, dk and dv too; none is empty.
    Raises: LaunchError where the kernel's integers, grid or copy engine cannot express them.
    """
    kernel = loaded.kernel
    values = run_time_values(kernel, extents, scalars)
    if reasons := _violations(loaded, extents, values):
        raise LaunchError(reasons)
    recipes = {recipe.field: recipe for recipe in kernel.tensor_maps}
    grid = _grid(loaded, extents["q"], int(values["tiles"]))
    fields = tuple(enumerate(kernel.fields))
    return Prepared(
        loaded=loaded,
        layout=struct.Struct(pack_format(kernel)),
        values=tuple(0 if f.type in _ADDRESSED else values[f.name] for f in kernel.fields),
        pointers=tuple((index, f.name) for index, f in fields if f.type == "ptr"),
        maps=tuple(
            (index, _tensor_map(recipes[f.name], extents[recipes[f.name].tensor]))
            for index, f in fields
            if f.type == "tensor_map"
        ),
        start=(loaded.handle, *grid, kernel.threads, 1, 1, kernel.smem_bytes),
    )


def workspace_bytes(kernel: KernelEntry, q: Extent) -> dict[str, int]:
    """Bytes of each workspace that the kernel names. The kernels of one problem share them, 16-byte
    aligned; only `tile_counter` has to be zero before the first launch."""
    blocks = q.batch * q.heads * _row_blocks(kernel, q)
    known = {
        "tile_counter": 4,
        "lse_log2": 4 * kernel.row_block * blocks,
        "d": 4 * kernel.row_block * blocks,
        "dq_acc": 4 * kernel.dq_floats * blocks,
        "turns": 4 * blocks,
    }
    return {name: known[name] for name in kernel.workspace}


def _row_blocks(kernel: KernelEntry, q: Extent) -> int:
    return -(-q.seq // kernel.row_block) if kernel.row_block else 0


def _grid(loaded: LoadedKernel, q: Extent, tiles: int) -> tuple[int, int, int]:
    if loaded.kernel.grid == "persistent_tiles":
        return min(loaded.multiprocessors, tiles), 1, 1
    return _row_blocks(loaded.kernel, q) * loaded.kernel.block_ctas, q.heads, q.batch


def _violations(
    loaded: LoadedKernel, extents: dict[str, Extent], values: dict[str, int | float]
) -> list[str]:
    reasons = [
        f"{name}: {extent.seq} positions; a kernel takes fewer than {LENGTH_LIMIT}"
        for name, extent in extents.items()
        if extent.seq >= LENGTH_LIMIT
    ]
    if values["tiles"] + loaded.multiprocessors >= 1 << 31:
        reasons.append(f"{values['tiles']} tiles; a kernel takes fewer than 2^31")
    if loaded.kernel.grid == "row_blocks":
        counts = {"query heads": extents["q"].heads, "sequences": extents["q"].batch}
        reasons += [
            f"{count} {what}; a backward takes at most {GRID_LIMIT}"
            for what, count in counts.items()
            if count > GRID_LIMIT
        ]
    reasons += [
        f"{recipe.tensor}: a stride of 2^40 bytes or more is out of the copy engine's reach"
        for recipe in loaded.kernel.tensor_maps
        if max(_stride_bytes(recipe, extents[recipe.tensor])) >= TMA_STRIDE_LIMIT
    ]
    return reasons


def run_time_values(
    kernel: KernelEntry, extents: dict[str, Extent], scalars: Scalars
) -> dict[str, int | float]:
    """Every value that a parameter may name, from shapes and scalars."""
    q, k = extents["q"], extents["k"]
    tiled = q if kernel.tile_axis == "q" else k
    tiles = -(-tiled.seq // kernel.tile_rows)  # along one head
    total_heads = tiled.batch * tiled.heads
    descale_strides = {
        f"descale_{name}_stride_{axis}": stride
        for name, strides in zip("qkv", scalars.descale_strides, strict=True)
        for axis, stride in zip(("batch", "head"), strides, strict=True)
    }
    return {
        "q_len": q.seq,
        "kv_len": k.seq,
        "tiles": tiles * total_heads,
        **dict.fromkeys(("tiles_m", "q_tiles", "kv_blocks"), tiles),
        "q_blocks": _row_blocks(kernel, q),
        "heads_q": q.heads,
        "heads_kv": k.heads,
        "total_heads": total_heads,
        "heads_per_group": heads_per_group(kernel, extents),
        "tail_rows": tiles // kernel.tail_share if kernel.tail_share else 0,
        "group_size": q.heads // k.heads,
        "bottom_right": int(scalars.bottom_right),
        "scale": scalars.softmax_scale,
        "scale_log2": scalars.softmax_scale * LOG2_E,
        "window_left": scalars.window_left,
        "window_right": scalars.window_right,
        **descale_strides,
        **_strides(extents),
    }


def _strides(extents: dict[str, Extent]) -> dict[str, int]:
    """`o_stride_row` … of the tensors that kernels address themselves."""
    return {
        f"{name}_stride_{axis}": stride
        for name in ("o", "d_o", "dq")
        if (x := extents.get(name))
        for axis, stride in zip(
            ("row", "head", "batch"), (x.stride_seq, x.stride_heads, x.stride_batch), strict=True
        )
    }


def heads_per_group(kernel: KernelEntry, extents: dict[str, Extent]) -> int:
    """Heads that are worked on together, so that what their tiles share stays in L2: of query
    heads the keys and values, of key/value heads the queries, output gradients and sums of dQ."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    group_size = q.heads // k.heads
    if kernel.tile_axis == "kv":
        bytes_per_row = (q.dim + v.dim) * 2 + q.dim * 4 * (kernel.dq_floats > 0)
        fitting = kernel.kv_group_bytes // max(1, q.seq * bytes_per_row * group_size)
        return max(1, min(k.batch * k.heads, kernel.group_heads, fitting))
    element_bytes = next((DTYPE_BYTES[m.dtype] for m in kernel.tensor_maps if m.tensor == "k"), 2)
    bytes_per_head = max(1, k.seq * (k.dim + v.dim) * element_bytes)
    kv_heads = min(kernel.kv_group_bytes // bytes_per_head, kernel.group_heads // group_size)
    return max(1, min(q.batch * q.heads, group_size * max(1, kv_heads)))


def launch(prepared: Prepared, addresses: dict[str, int], stream: int) -> None:
    """Start the kernel on `stream` of the current context; does not wait.

    addresses: device addresses of q, k, v, o, lse, of the scales and maxima of an 8-bit kernel (0
    where there are none; a maximum must be zero), of d_o, dq, dk, dv and dlse for a backward (dlse
    0 where the LSE has no gradient), and of the workspaces that the kernel names (`tile_counter`:
    one int32, zero, left zero; one launch at a time may use it).
    Raises: LaunchError with the driver's reason.
    """
    packed: list[Any] = [*prepared.values]
    for index, name in prepared.pointers:
        packed[index] = addresses[name]
    for index, tensor_map in prepared.maps:
        packed[index] = _encoded(tensor_map, addresses[tensor_map.tensor])
    prepared.layout.pack_into(_parameters.memory, _parameters.offset, *packed)
    checked(
        prepared.loaded.kernel.entry,
        driver().cuLaunchKernel(*prepared.start, stream, _parameters.pointers, 0),
    )


class _Parameters(threading.local):
    """A thread's host memory for the parameters of a launch, 64-byte aligned: the driver copies
    them before it returns. `pointers` is the address of the one pointer to them."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * (PARAMETER_LIMIT + 64))()
        self.offset = -ctypes.addressof(self.memory) % 64
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.memory) + self.offset)
        self.pointers = ctypes.addressof(self._pointer)


_parameters = _Parameters()


def pack_format(kernel: KernelEntry) -> str:
    """The struct format that lays the fields out at their offsets, without implicit padding."""
    parts, position = ["<"], 0
    for field in kernel.fields:
        code = _FORMATS[field.type]
        parts.append("x" * (field.offset - position) + code)
        position = field.offset + struct.calcsize("<" + code)
    return "".join(parts)


def _stride_bytes(recipe: TensorMapRecipe, extent: Extent) -> tuple[int, int, int]:
    """Strides of seq, head and batch in bytes. One that steps over a single element is free,
    and the copy engine still wants it to be a multiple of 16."""
    size = DTYPE_BYTES[recipe.dtype]
    row = -(-extent.dim * size // 16) * 16
    return (
        extent.stride_seq * size if extent.seq > 1 else row,
        extent.stride_heads * size if extent.heads > 1 else row,
        extent.stride_batch * size if extent.batch > 1 else row,
    )


def _tensor_map(recipe: TensorMapRecipe, extent: Extent) -> TensorMap:
    cuda = driver()
    dims = (extent.dim, extent.seq, extent.heads, extent.batch)
    types = cuda.CUtensorMapDataType
    dtype = {
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "e4m3": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "e5m2": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[recipe.dtype]
    layout = (
        [cuda.cuuint64_t(dim) for dim in dims],
        [cuda.cuuint64_t(stride) for stride in _stride_bytes(recipe, extent)],
        [cuda.cuuint32_t(box) for box in (recipe.box_cols, recipe.box_rows, 1, 1)],
        [cuda.cuuint32_t(1)] * 4,
    )
    modes = (
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap(recipe.tensor, (dtype, len(dims)), (*layout, *modes))


@lru_cache(MAPS_KEPT)  # allocators hand out the same addresses again and again
def _encoded(tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes that the copy engine reads. They depend on the arguments alone."""
    encoded = checked(
        f"tensor map of {tensor_map.tensor}",
        driver().cuTensorMapEncodeTiled(*tensor_map.before, address, *tensor_map.after),
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)
