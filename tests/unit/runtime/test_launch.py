"""Launching: what the driver is handed, seen by a driver that starts nothing."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from attngen import LaunchError
from attngen.runtime import launch, run_time
from attngen.runtime.load import LoadedKernel
from attngen.runtime.program import Field, KernelEntry, TensorMapRecipe
from attngen.runtime.run_time import Extent, Scalars

ENTRY = KernelEntry(
    entry="kernel",
    threads=256,
    smem_bytes=1000,
    tile_rows=64,
    params_bytes=168,
    fields=(
        Field("map_k", "tensor_map", 0),
        Field("lse", "ptr", 128),
        Field("q_len", "i32", 136),
        Field("scale_log2", "f32", 140),
        Field("o_stride_batch", "i64", 144),
        Field("tile_counter", "ptr", 160),  # after a gap
    ),
    tensor_maps=(TensorMapRecipe("map_k", "k", "bf16", 64, 128),),
    grid="persistent_tiles",
    workspace=("tile_counter",),
    kv_group_bytes=1 << 20,
    group_heads=4,
    tail_share=0,
)
LENGTH, HEADS, DIM = 100, 2, 64
EXTENT = Extent(3, LENGTH, HEADS, DIM, LENGTH * HEADS * DIM, HEADS * DIM, DIM)
EXTENTS = dict.fromkeys(("q", "k", "v", "o"), EXTENT)
ADDRESSES = {"q": 16, "k": 32, "v": 48, "o": 64, "lse": 80, "tile_counter": 96}


def start_of(config: Any, handle: Any) -> tuple[Any, ...]:
    """Pick what cuLaunchKernel takes before the parameters out of cuLaunchKernelEx's arguments."""
    sizes = (getattr(config, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ")
    return handle, *sizes, config.sharedMemBytes, int(config.hStream)


class Driver:
    """Writes down launches; its tensor map is the address sixteen times."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], bytes]] = []
        self.pointers: list[int] = []
        self.encoded: list[int] = []
        self.tensor_maps: list[tuple[Any, ...]] = []
        self.status = bindings.CUresult.CUDA_SUCCESS

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def cuTensorMapEncodeTiled(self, dtype: Any, rank: int, address: int, *rest: Any) -> Any:
        self.encoded.append(address)
        self.tensor_maps.append((dtype, rank, *rest))
        memory = ctypes.create_string_buffer(struct.pack("<16Q", *[address] * 16), 128)
        pointer = SimpleNamespace(getPtr=lambda: ctypes.addressof(memory))
        return bindings.CUresult.CUDA_SUCCESS, pointer

    def cuLaunchKernel(self, *arguments: Any) -> Any:
        *start, pointers, _ = arguments
        self.pointers.append(pointers)
        address = ctypes.c_void_p.from_address(pointers).value
        assert address is not None and address % 64 == 0
        self.launches.append((tuple(start), ctypes.string_at(address, ENTRY.params_bytes)))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr("attngen.runtime.launch.driver", lambda: found)
    return found


def prepared() -> launch.Prepared:
    return launch.prepare(LoadedKernel("handle", ENTRY, 0, 132), EXTENTS, Scalars(0.5))


def test_launch_parameters_lie_at_their_offsets(driver: Driver) -> None:
    launch.launch(prepared(), ADDRESSES, 7)
    ((start, parameters),) = driver.launches
    tiles = 2 * 3 * HEADS  # two tiles of 64 rows each
    assert start == ("handle", tiles, 1, 1, 256, 1, 1, 1000, 7)
    assert parameters[:128] == struct.pack("<16Q", *[ADDRESSES["k"]] * 16)
    lse, q_len, scale, stride, counter = struct.unpack_from("<Qifq8xQ", parameters, 128)
    assert (lse, q_len, stride, counter) == (80, LENGTH, EXTENT.stride_batch, 96)
    assert scale == pytest.approx(0.5 * 1.4426950408889634)


@pytest.mark.parametrize(("multiprocessors", "ctas"), [(132, 24), (9, 8), (1, 2)])
def test_launch_of_pairs_has_two_ctas_a_tile_or_as_many_as_fit(
    driver: Driver, multiprocessors: int, ctas: int
) -> None:
    entry = replace(ENTRY, grid="persistent_pairs")
    loaded = LoadedKernel("handle", entry, 0, multiprocessors)
    launch.launch(launch.prepare(loaded, EXTENTS, Scalars(0.5)), ADDRESSES, 7)
    ((start, _),) = driver.launches
    assert start[1] == ctas


def test_launch_tensor_map_is_encoded_once_for_an_address_and_shape(driver: Driver) -> None:
    first, second = prepared(), prepared()
    for address in (32, 48, 32):
        launch.launch(first, {**ADDRESSES, "k": address}, 0)
    launch.launch(second, ADDRESSES, 0)
    assert driver.encoded == [32, 48, 32]
    heads = [struct.unpack_from("<Q", parameters)[0] for _, parameters in driver.launches]
    assert heads == [32, 48, 32, 32]


def test_launch_parameters_are_kept_by_all_addresses(driver: Driver) -> None:
    """Parameters that another launch, or thread, has are never written again."""
    once = prepared()
    for lse in (80, 96, 80):
        launch.launch(once, {**ADDRESSES, "lse": lse}, 0)
    assert [struct.unpack_from("<Q", x, 128)[0] for _, x in driver.launches] == [80, 96, 80]
    assert len(set(driver.pointers)) == 2 and driver.pointers[0] == driver.pointers[2]


def test_launch_parameters_kept_are_limited(driver: Driver) -> None:
    once = prepared()
    for number in range(2 * launch.PARAMETERS_KEPT + 1):
        launch.launch(once, {**ADDRESSES, "lse": 16 * number}, 0)
        assert struct.unpack_from("<Q", driver.launches[-1][1], 128)[0] == 16 * number
        assert len(once.kept) <= launch.PARAMETERS_KEPT


def test_launch_refused_by_the_driver_says_why(driver: Driver) -> None:
    driver.status = bindings.CUresult.CUDA_ERROR_INVALID_HANDLE
    with pytest.raises(LaunchError, match="kernel: CUDA_ERROR_INVALID_HANDLE"):
        launch.launch(prepared(), ADDRESSES, 0)


def test_launch_too_long_or_too_far_apart_is_refused_with_every_reason(driver: Driver) -> None:
    far = EXTENT._replace(stride_batch=1 << 39)
    long = EXTENT._replace(seq=1 << 30)
    with pytest.raises(LaunchError) as caught:
        launch.prepare(
            LoadedKernel("handle", ENTRY, 0, 132), {**EXTENTS, "k": far, "v": long}, Scalars(0.5)
        )
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == ["v", "k"]


def eight_bit(**changes: Any) -> KernelEntry:
    """A kernel of 8-bit keys that reads the strides of descales."""
    strides = [f"descale_{name}_stride_{axis}" for name in "qkv" for axis in ("batch", "head")]
    fields = (
        Field("map_k", "tensor_map", 0),
        *(Field(name, "i32", 128 + 4 * place) for place, name in enumerate(strides)),
    )
    recipe = TensorMapRecipe("map_k", "k", "e4m3", 128, 96)
    return replace(ENTRY, fields=fields, tensor_maps=(recipe,), workspace=(), **changes)


def descale_strides(*strides: int) -> dict[str, int]:
    """By the names of the parameters, of q, k and v over batch and head."""
    names = (f"descale_{name}_stride_{axis}" for name in "qkv" for axis in ("batch", "head"))
    return dict(zip(names, strides, strict=True))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_launch_tensor_map_of_8_bits_counts_bytes(driver: Driver, dtype: str) -> None:
    entry = eight_bit()
    recipe = replace(entry.tensor_maps[0], dtype=dtype)
    loaded = LoadedKernel("handle", replace(entry, tensor_maps=(recipe,)), 0, 132)
    scalars = Scalars(0.5, numbers=descale_strides(*(0,) * 6))
    launch.launch(launch.prepare(loaded, EXTENTS, scalars), {"k": 32 + ord(dtype[1])}, 0)
    ((element, rank, dims, strides, box, *_),) = driver.tensor_maps
    assert element == bindings.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8 and rank == 4
    assert [int(size) for size in dims] == [DIM, LENGTH, HEADS, 3]
    assert [int(stride) for stride in strides] == [HEADS * DIM, DIM, LENGTH * HEADS * DIM]
    assert [int(size) for size in box] == [128, 96, 1, 1]


def test_launch_strides_of_descales_are_those_of_their_operands(driver: Driver) -> None:
    for wanted in ((7, 1, 0, 0, 2, 5), (0,) * 6):
        given = Scalars(0.5, numbers=descale_strides(*wanted))
        prepared = launch.prepare(LoadedKernel("handle", eight_bit(), 0, 132), EXTENTS, given)
        launch.launch(prepared, {"k": 32}, 0)
        assert struct.unpack_from("<6i", driver.launches[-1][1], 128) == wanted


def test_launch_heads_that_share_l2_are_counted_in_bytes_of_their_dtype() -> None:
    extent = Extent(1, 4096, 8, 128, 1 << 22, 1024, 128)
    extents = dict.fromkeys(("q", "k", "v", "o"), extent)
    entry = eight_bit(kv_group_bytes=1 << 22, group_heads=8)  # a head has 2^20 bytes of K and V
    assert run_time.heads_per_group(entry, extents) == 4
    recipe = replace(entry.tensor_maps[0], dtype="bf16")
    assert run_time.heads_per_group(replace(entry, tensor_maps=(recipe,)), extents) == 2


def test_prepare_a_kernel_of_another_kind_of_call_names_what_it_lacks() -> None:
    fields = (*ENTRY.fields, Field("nonsense", "i32", 168))
    maps = (*ENTRY.tensor_maps, TensorMapRecipe("map_k", "dbias", "bf16", 64, 128))
    kernel = replace(ENTRY, fields=fields, tensor_maps=maps, params_bytes=172)
    with pytest.raises(LaunchError) as caught:
        launch.prepare(LoadedKernel(0, kernel, 0, 132), EXTENTS, Scalars(1.0))
    found = [reason.partition(" has no ")[2].partition(";")[0] for reason in caught.value.reasons]
    assert found == ["nonsense", "dbias"]


def test_launch_returns_the_parameters_that_start_it_again(driver: Driver) -> None:
    once = prepared()
    parameters = launch.launch(once, ADDRESSES, 7)
    launch.relaunch(once, parameters, 9)
    (first, second), (one, other) = driver.launches, driver.pointers
    assert one == other and first[1] == second[1]
    assert first[0][-1] == 7 and second[0] == (*first[0][:-1], 9)
    driver.status = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(LaunchError, match="kernel: CUDA_ERROR_INVALID_VALUE"):
        launch.relaunch(once, parameters, 9)
