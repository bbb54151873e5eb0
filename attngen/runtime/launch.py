"""Launch: fill a kernel's parameters from shapes, strides and addresses, and start it.

Neither torch nor the compiler is known here: a tensor is an address with sizes and strides, a
stream is a number. Whatever depends on shapes alone is worked out once (`prepare`) and reused.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

from ..errors import LaunchError, LimitError
from . import tracing
from .geometry import TMA_STRIDE_LIMIT, boxed, geometry_of
from .load import LoadedKernel, checked, driver
from .parameters import values_of
from .program import KernelEntry, TensorMapRecipe
from .run_time import Extent, Scalars, smem_bytes_of

LENGTH_LIMIT = 1 << 30  # positions; masks add lengths and windows in 32 bits
GRID_LIMIT = 65535  # CTAs along the second and third axis
FILLED = 0.95  # of the SMs
CONFIGS_KEPT = 16  # of a launch's streams, which take 3 µs each
PARAMETERS_KEPT = 128  # of a launch's shapes, a kilobyte each: one for each layer of most models
MAPS_KEPT = 4096  # encoded tensor maps, 128 bytes each: as many as a large model's activations
_FORMATS = {
    "i32": "i",
    "f32": "f",
    "i64": "q",
    "ptr": "Q",
    "tensor_map": "128s",
    "sequence_map": "192s",
    "page_map": "192s",
}
_MAPS = ("tensor_map", "sequence_map", "page_map")
_ADDRESSED = ("ptr", *_MAPS)


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A tensor map without its address, as cuTensorMapEncodeTiled takes it.

    before, after: arguments on either side of the address of `tensor`; units: the bytes that follow
    the encoded map. All are empty where a kernel does without a map.
    """

    tensor: str
    units: bytes
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    spare: bool = False


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch of one kernel for given shapes; only addresses are missing.

    values: one a parameter field, in their order; zero where an address decides, `pointers` and
    `maps` say which. start: what cuLaunchKernel takes before the stream. paired: whether two
    neighbouring CTAs are a cluster. addressed: picks the addresses that the parameters depend on;
    kept: parameters by these, since allocators hand out the same addresses again and again;
    configs: arguments of cuLaunchKernelEx by the stream.
    """

    loaded: LoadedKernel
    layout: struct.Struct
    values: tuple[int | float, ...]
    pointers: tuple[tuple[int, str], ...]
    maps: tuple[tuple[int, TensorMap], ...]
    start: tuple[Any, ...]
    paired: bool
    addressed: Callable[[dict[str, int]], Any]
    kept: dict[Any, Parameters] = field(default_factory=dict)
    configs: dict[int, Any] = field(default_factory=dict)


class Parameters:
    """A kernel's parameters in host memory, 64-byte aligned.

    The driver copies them before a launch returns. `pointers` is the address of the one pointer to
    them.
    """

    __slots__ = ("_memory", "_pointer", "pointers")

    def __init__(self, layout: struct.Struct, values: list[Any], size: int) -> None:
        self._memory = (ctypes.c_char * (size + 64))()
        offset = -ctypes.addressof(self._memory) % 64
        layout.pack_into(self._memory, offset, *values)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._memory) + offset)
        self.pointers = ctypes.addressof(self._pointer)


def prepare(loaded: LoadedKernel, extents: dict[str, Extent], scalars: Scalars) -> Prepared:
    """Everything about a launch that the tensors' addresses do not change.

    extents: those of q, k, v and o, for a backward of d_o, dq, dk and dv too; none is empty.
    Raises: LimitError where the kernel's integers, grid or copy engine cannot express them.
    """
    kernel = loaded.kernel
    values = values_of(kernel, extents, scalars)
    if reasons := _unfilled(kernel, extents, values):
        raise LaunchError(reasons)
    if reasons := _violations(loaded, extents, values):
        raise LimitError(reasons)
    recipes = {recipe.field: recipe for recipe in kernel.tensor_maps}
    grid = _grid(loaded, extents["q"], values)
    share = -(-math.prod(grid) // loaded.multiprocessors)
    fields = tuple(enumerate(kernel.fields))
    pointers = tuple([(index, f.name) for index, f in fields if f.type == "ptr"])
    tensors = [recipes[f.name].tensor for f in kernel.fields if f.type in _MAPS]
    return Prepared(
        loaded=loaded,
        layout=struct.Struct(pack_format(kernel)),
        values=tuple([0 if f.type in _ADDRESSED else values[f.name] for f in kernel.fields]),
        pointers=pointers,
        maps=tuple(
            (index, _tensor_map(kernel, recipes[f.name], extents))
            for index, f in fields
            if f.type in _MAPS
        ),
        start=(
            *(loaded.handle, *grid, kernel.threads, 1, 1),
            smem_bytes_of(kernel, share, loaded.target),
        ),
        # 0.3 to 1.5 %, -0.9 % on one chip of 13; 112 or 120 CTAs lose 2 % (H200, 132 SMs).
        paired=grid[0] % 2 == 0 and kernel.ctas > 1 and _fill_sms(loaded, grid),
        addressed=itemgetter(*dict.fromkeys([*tensors, *(name for _, name in pointers)])),
    )


def _grid(loaded: LoadedKernel, q: Extent, values: dict[str, int | float]) -> tuple[int, int, int]:
    kernel = loaded.kernel
    if kernel.grid == "persistent_tiles":
        tiles, places = int(values["tiles"]), loaded.multiprocessors
        turns = -(-tiles // (places * kernel.ctas))  # of an SM's CTAs; fewer CTAs may take as many
        return min(places * -(-tiles // (places * turns)), tiles), 1, 1
    if kernel.grid == "persistent_pairs":
        return 2 * min(max(loaded.multiprocessors // 2, 1), int(values["tiles"])), 1, 1
    if kernel.grid == "tiles":
        return int(values["tiles"]), 1, 1
    if kernel.grid == "multiprocessors":
        return loaded.multiprocessors * kernel.ctas, 1, 1
    if kernel.grid == "one":
        return 1, 1, 1
    if kernel.grid == "splits":
        tiles = int(values["row_tiles"]) * int(values["heads_kv"]) * q.batch
        return tiles, int(values["splits"]), 1
    if kernel.grid == "rows":
        return -(-q.batch * q.heads * q.seq // kernel.tile_rows), 1, 1
    blocks = -(-int(values["q_blocks"]) // kernel.cta_blocks) * kernel.block_ctas
    blocks += int(values["key_parts"])
    if kernel.folds and max(q.heads, q.batch) > GRID_LIMIT:
        return blocks * q.heads * q.batch, 1, 1
    return blocks, q.heads, q.batch


def _fill_sms(loaded: LoadedKernel, grid: tuple[int, int, int]) -> bool:
    """Whether CTAs of split keys leave hardly an SM free."""
    return loaded.kernel.grid == "splits" and math.prod(grid) > FILLED * loaded.multiprocessors


def _unfilled(
    kernel: KernelEntry, extents: dict[str, Extent], values: dict[str, int | float]
) -> list[str]:
    """Parameters of which a call of this kind knows nothing: the kernel is for another one."""
    numbers = [f.name for f in kernel.fields if f.type not in _ADDRESSED and f.name not in values]
    tensors = [each.tensor for each in kernel.tensor_maps if each.tensor not in extents]
    return [
        f"{kernel.entry}: a call of this kind has no {name}; it is the kernel of another one"
        for name in dict.fromkeys([*numbers, *tensors])
    ]


def _violations(
    loaded: LoadedKernel, extents: dict[str, Extent], values: dict[str, int | float]
) -> list[str]:
    reasons = [
        f"{name}: {extent.seq} positions; a kernel takes fewer than {LENGTH_LIMIT}"
        for name, extent in extents.items()
        if extent.seq >= LENGTH_LIMIT
    ]
    if values["tiles"] + loaded.multiprocessors * loaded.kernel.ctas >= 1 << 31:
        reasons.append(f"{values['tiles']} tiles; a kernel takes fewer than 2^31")
    reasons += _grid_violations(_grid(loaded, extents["q"], values))
    if loaded.kernel.grid == "splits":
        rows = extents["q"].seq * int(values["group_size"])
        if rows >= LENGTH_LIMIT:
            reasons.append(f"{rows} queries of a group of heads; one has fewer than {LENGTH_LIMIT}")
    if values["kv_len"] >= LENGTH_LIMIT and extents["k"].seq < LENGTH_LIMIT:
        room = values["kv_len"]
        reasons.append(f"room for {room} keys; a sequence has fewer than {LENGTH_LIMIT}")
    reasons += [
        f"{each.name}={values[each.name]}; a kernel takes 32-bit integers"
        for each in loaded.kernel.fields
        if each.type == "i32" and not -(1 << 31) <= values[each.name] < 1 << 31
    ]
    reasons += [
        f"{recipe.tensor}: strides {extents[recipe.tensor][4:6]} of sequences and positions have "
        "too small a common step; make it contiguous"
        for recipe in loaded.kernel.tensor_maps
        if not recipe.spare
        and geometry_of(loaded.kernel, recipe, extents[recipe.tensor]).sizes[3] > 1 << 31
    ]
    reasons += [
        f"{recipe.tensor}: a stride of 2^40 bytes or more (of positions: above 2^34 where lengths "
        "vary) is out of the copy engine's reach"
        for recipe in loaded.kernel.tensor_maps
        if not recipe.spare
        for strides in [geometry_of(loaded.kernel, recipe, extents[recipe.tensor]).strides]
        if min(strides) < 0 or max(strides) >= TMA_STRIDE_LIMIT
    ]
    return reasons


def _grid_violations(grid: tuple[int, int, int]) -> Iterator[str]:
    """Axes of a grid that are longer than a launch may have them."""
    limits = (1 << 31) - 1, GRID_LIMIT, GRID_LIMIT
    names = "blocks of rows", "query heads", "sequences"
    for size, limit, name in zip(grid, limits, names, strict=True):
        if size > limit:
            yield f"{size} {name} in a grid of {grid}; this kernel takes at most {limit}"


def launch(prepared: Prepared, addresses: dict[str, int], stream: int) -> Parameters:
    """Start the kernel on `stream` of the current context; does not wait. Returns its parameters,
    with which `relaunch` starts it again.

    addresses: device addresses of q, k, v, o, lse, of the scales and maxima of an 8-bit kernel (0
    where there are none; a maximum must be zero), of d_o, dq, dk, dv and dlse for a backward (dlse
    0 where the LSE has no gradient), and of the workspaces that the kernel names (`tile_counter`:
    one int32, zero, left zero; one launch at a time may use it).
    Raises: LaunchError with the driver's reason.
    """
    key = prepared.addressed(addresses)
    parameters = prepared.kept.get(key)
    if parameters is None:
        parameters = _pack(prepared, addresses)
        if len(prepared.kept) >= PARAMETERS_KEPT:
            prepared.kept.clear()
        prepared.kept[key] = parameters
    relaunch(prepared, parameters, stream)
    return parameters


def relaunch(prepared: Prepared, parameters: Parameters, stream: int) -> None:
    """Start the kernel as `launch` does, with parameters of its own. Raises: LaunchError."""
    loaded = prepared.loaded
    if tracing.recorders and loaded.variant is not None:
        tracing.note(loaded.variant)
    if loaded.kernel.dependent or prepared.paired:
        config = prepared.configs.get(stream)
        if config is None:
            config = _config(prepared.start, stream, loaded.kernel.dependent, prepared.paired)
            if len(prepared.configs) >= CONFIGS_KEPT:
                prepared.configs.clear()
            prepared.configs[stream] = config
        result = driver().cuLaunchKernelEx(config, loaded.handle, parameters.pointers, 0)
    else:
        result = driver().cuLaunchKernel(*prepared.start, stream, parameters.pointers, 0)
    if result[0]:  # as of most launches it is not, a frame less
        checked(loaded.kernel.entry, result)


def _pack(prepared: Prepared, addresses: dict[str, int]) -> Parameters:
    values: list[Any] = [*prepared.values]
    for index, name in prepared.pointers:
        values[index] = addresses[name]
    for index, tensor_map in prepared.maps:
        values[index] = _encoded(tensor_map, addresses[tensor_map.tensor])
    return Parameters(prepared.layout, values, prepared.loaded.kernel.params_bytes)


def _config(start: tuple[Any, ...], stream: int, dependent: bool, paired: bool) -> Any:
    """The launch of a kernel that itself waits for the one before it, or whose neighbouring CTAs
    are in pairs."""
    cuda = driver()
    kinds, attributes = cuda.CUlaunchAttributeID, []
    if dependent:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if paired:
        attribute = cuda.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = 2, 1, 1
        attributes.append(attribute)
    config = cuda.CUlaunchConfig()
    _, *sizes, config.sharedMemBytes = start
    config.gridDimX, config.gridDimY, config.gridDimZ = sizes[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = sizes[3:]
    config.hStream, config.attrs, config.numAttrs = stream, attributes, len(attributes)
    return config


def pack_format(kernel: KernelEntry) -> str:
    """The struct format that lays the fields out at their offsets, without implicit padding."""
    parts, position = ["<"], 0
    for each in kernel.fields:
        code = _FORMATS[each.type]
        parts.append("x" * (each.offset - position) + code)
        position = each.offset + struct.calcsize("<" + code)
    return "".join(parts)


def _tensor_map(
    kernel: KernelEntry, recipe: TensorMapRecipe, extents: dict[str, Extent]
) -> TensorMap:
    cuda = driver()
    extent = extents[recipe.tensor]
    if recipe.spare and not boxed(recipe, extent):
        return TensorMap(recipe.tensor, b"", (), (), spare=True)
    sizes, strides, box, units = geometry_of(kernel, recipe, extent)
    types = cuda.CUtensorMapDataType
    dtype = {
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "e4m3": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "e5m2": types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[recipe.dtype]
    layout = (
        [cuda.cuuint64_t(size) for size in sizes],
        [cuda.cuuint64_t(stride) for stride in strides],
        [cuda.cuuint32_t(size) for size in box],
        [cuda.cuuint32_t(1)] * len(sizes),
    )
    promotions = cuda.CUtensorMapL2promotion
    modes = (
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        getattr(promotions, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{recipe.l2_bytes}B"),
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    after_map = struct.pack(f"<{len(units)}i", *units).ljust(64, b"\0") if units else b""
    before, after = (dtype, len(sizes)), (*layout, *modes)
    return TensorMap(recipe.tensor, after_map, before, after, recipe.spare)


@lru_cache(MAPS_KEPT)  # allocators hand out the same addresses again and again
def _encoded(tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes that the copy engine reads, and what a kernel reads behind them. They depend on
    the arguments alone. Zeros where the copy engine cannot read the tensor, and need not."""
    if tensor_map.spare and (not tensor_map.before or address % 16):
        return bytes(128)
    encoded = checked(
        f"tensor map of {tensor_map.tensor}",
        driver().cuTensorMapEncodeTiled(*tensor_map.before, address, *tensor_map.after),
    )
    return ctypes.string_at(int(encoded.getPtr()), 128) + tensor_map.units
