"""Launch: fill a kernel's parameters from shapes, strides and addresses, and start it.

Neither torch nor the compiler is known here: a tensor is an address with sizes and strides, a
stream is a number. Whatever depends on shapes alone is worked out once (`prepare`) and reused.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import LaunchError
from .load import LoadedKernel, checked, driver
from .program import KernelEntry, TensorMapRecipe

LENGTH_LIMIT = 1 << 30  # positions; masks add lengths and windows in 32 bits
UNBOUNDED = 1 << 30  # a window side without a bound
TMA_STRIDE_LIMIT = 1 << 40  # bytes
LOG2_E = 1.4426950408889634
_FORMATS = {"i32": "i", "f32": "f", "i64": "q", "ptr": "Q", "tensor_map": "128s"}
_ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


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
    there is none), whether the diagonal is aligned to the bottom right."""

    softmax_scale: float
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    bottom_right: bool = False


@dataclass(frozen=True)
class Prepared:
    """A launch of one kernel for given shapes; only addresses are missing."""

    loaded: LoadedKernel
    grid: int
    values: dict[str, int | float]
    maps: tuple[tuple[TensorMapRecipe, tuple[Any, ...]], ...]


def prepare(loaded: LoadedKernel, extents: dict[str, Extent], scalars: Scalars) -> Prepared:
    """Everything about a launch that the tensors' addresses do not change.

    extents: those of q, k, v and o. Raises: LaunchError where the kernel's integers or the copy
    engine cannot express them.
    """
    kernel = loaded.kernel
    values = run_time_values(kernel, extents, scalars)
    reasons = [
        f"{name}: {extent.seq} positions; a kernel takes fewer than {LENGTH_LIMIT}"
        for name, extent in extents.items()
        if extent.seq >= LENGTH_LIMIT
    ]
    if values["tiles"] + loaded.multiprocessors >= 1 << 31:
        reasons.append(f"{values['tiles']} tiles; a kernel takes fewer than 2^31")
    reasons += [
        f"{recipe.tensor}: a stride of 2^40 bytes or more is out of the copy engine's reach"
        for recipe in kernel.tensor_maps
        if max(_stride_bytes(recipe, extents[recipe.tensor])) >= TMA_STRIDE_LIMIT
    ]
    if reasons:
        raise LaunchError(reasons)
    maps = tuple(
        (recipe, _map_arguments(recipe, extents[recipe.tensor])) for recipe in kernel.tensor_maps
    )
    grid = min(loaded.multiprocessors, int(values["tiles"]))
    return Prepared(loaded, grid, values, maps)


def run_time_values(
    kernel: KernelEntry, extents: dict[str, Extent], scalars: Scalars
) -> dict[str, int | float]:
    """Every value that a parameter may name, from shapes and scalars."""
    q, k, o = extents["q"], extents["k"], extents["o"]
    tiles_m = -(-q.seq // kernel.tile_m)
    total_heads = q.batch * q.heads
    return {
        "q_len": q.seq,
        "kv_len": k.seq,
        "tiles": tiles_m * total_heads,
        "tiles_m": tiles_m,
        "heads_q": q.heads,
        "total_heads": total_heads,
        "heads_per_group": heads_per_group(kernel, extents),
        "tail_rows": tiles_m // kernel.tail_share if kernel.tail_share else 0,
        "group_size": q.heads // k.heads,
        "bottom_right": int(scalars.bottom_right),
        "scale": scalars.softmax_scale,
        "scale_log2": scalars.softmax_scale * LOG2_E,
        "window_left": scalars.window_left,
        "window_right": scalars.window_right,
        "o_stride_row": o.stride_seq,
        "o_stride_head": o.stride_heads,
        "o_stride_batch": o.stride_batch,
    }


def heads_per_group(kernel: KernelEntry, extents: dict[str, Extent]) -> int:
    """Query heads that are worked on together, so that their keys and values stay in L2."""
    q, k, v = extents["q"], extents["k"], extents["v"]
    group_size = q.heads // k.heads
    bytes_per_head = max(1, k.seq * (k.dim + v.dim) * 2)
    kv_heads = min(kernel.kv_group_bytes // bytes_per_head, kernel.group_heads // group_size)
    return max(1, min(q.batch * q.heads, group_size * max(1, kv_heads)))


def launch(prepared: Prepared, addresses: dict[str, int], stream: int) -> None:
    """Start the kernel on `stream` of the current context; does not wait.

    addresses: device addresses of q, k, v, o, lse and the workspaces that the kernel names
    (`tile_counter`: one int32, zero, left zero; one launch at a time may use it).
    Raises: LaunchError with the driver's reason.
    """
    cuda = driver()
    kernel = prepared.loaded.kernel
    buffer = _buffer(kernel)
    packed: dict[str, Any] = {**prepared.values, **addresses}
    for recipe, arguments in prepared.maps:
        packed[recipe.field] = _encode(cuda, recipe, arguments, addresses[recipe.tensor])
    buffer.layout.pack_into(
        buffer.memory, buffer.offset, *(packed[name] for name in buffer.names)
    )
    checked(
        kernel.entry,
        cuda.cuLaunchKernel(
            prepared.loaded.handle,
            *(prepared.grid, 1, 1),
            *(kernel.threads, 1, 1),
            kernel.smem_bytes,
            stream,
            ctypes.addressof(buffer.pointer),
            0,
        ),
    )


@dataclass(frozen=True)
class _Buffer:
    """Host memory for one kernel's parameters, 64-byte aligned, and how they are packed."""

    layout: struct.Struct
    names: tuple[str, ...]
    memory: Any
    offset: int
    pointer: Any


class _Buffers(threading.local):
    """One buffer a kernel and thread: the driver copies the parameters before it returns."""

    def __init__(self) -> None:
        self.by_entry: dict[str, _Buffer] = {}


_buffers = _Buffers()


def _buffer(kernel: KernelEntry) -> _Buffer:
    found = _buffers.by_entry.get(kernel.entry)
    if found is None:
        memory = (ctypes.c_char * (kernel.params_bytes + 64))()
        offset = -ctypes.addressof(memory) % 64
        pointer = ctypes.c_void_p(ctypes.addressof(memory) + offset)
        layout = struct.Struct(pack_format(kernel))
        names = tuple(field.name for field in kernel.fields)
        found = _buffers.by_entry[kernel.entry] = _Buffer(layout, names, memory, offset, pointer)
    return found


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
    size = _ELEMENT_BYTES[recipe.dtype]
    row = -(-extent.dim * size // 16) * 16
    return (
        extent.stride_seq * size if extent.seq > 1 else row,
        extent.stride_heads * size if extent.heads > 1 else row,
        extent.stride_batch * size if extent.batch > 1 else row,
    )


def _map_arguments(recipe: TensorMapRecipe, extent: Extent) -> tuple[Any, ...]:
    cuda = driver()
    dims = (extent.dim, extent.seq, extent.heads, extent.batch)
    return (
        [cuda.cuuint64_t(dim) for dim in dims],
        [cuda.cuuint64_t(stride) for stride in _stride_bytes(recipe, extent)],
        [cuda.cuuint32_t(box) for box in (recipe.box_cols, recipe.box_rows, 1, 1)],
        [cuda.cuuint32_t(1)] * 4,
    )


def _encode(cuda: Any, recipe: TensorMapRecipe, arguments: tuple[Any, ...], address: int) -> bytes:
    dtype = {
        "bf16": cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    }[recipe.dtype]
    tensor_map = checked(
        f"tensor map of {recipe.tensor}",
        cuda.cuTensorMapEncodeTiled(
            dtype,
            4,
            address,
            *arguments,
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return ctypes.string_at(int(tensor_map.getPtr()), 128)
