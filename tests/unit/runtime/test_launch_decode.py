"""Launching decode kernels: grids, fields and the dependent launch, seen by a driver that starts
nothing."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings

from attngen import AttentionSpec, LaunchError
from attngen.call import decode, kernel_choice
from attngen.call.numbers import Arguments
from attngen.call.prepared import lay_out_workspaces
from attngen.call.table import OPTIONAL
from attngen.call.tensors import TensorDesc
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.frontends.pytorch import descriptions, forward
from attngen.kernels.plan import plans
from attngen.runtime import launch
from attngen.runtime.load import LoadedKernel
from attngen.runtime.run_time import Extent, Scalars
from attngen.spec import resolve
from attngen.targets.target import DEFAULT
from tests.unit.runtime.test_launch import start_of

PAGES, PAGE, HEADS, D = 50, 16, 2, 128
BATCH, QUERIES, GROUP = 3, 5, 20
TOKENS = 40
PAIRED = "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
K = Extent(PAGES, PAGE, HEADS, D, PAGE * HEADS * D, HEADS * D, D)


class Driver:
    """Writes down launches, by which of the two calls, and tensor maps."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...], int]] = []
        self.boxes: list[list[int]] = []
        self.l2: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        self.boxes.append([int(size) for size in arguments[5]])
        self.l2.append(arguments[9])
        memory = ctypes.create_string_buffer(128)
        return bindings.CUresult.CUDA_SUCCESS, SimpleNamespace(
            getPtr=lambda: ctypes.addressof(memory)
        )

    def cuLaunchKernel(self, *arguments: Any) -> Any:
        *start, pointers, _ = arguments
        self.launches.append(("plain", tuple(start), pointers))
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config: Any, handle: Any, pointers: int, _: int) -> Any:
        start = start_of(config, handle)
        (attribute,) = config.attrs
        assert config.numAttrs == 1
        self.launches.append((attribute.id.name, start, pointers))
        if attribute.id.name == PAIRED:
            cluster = attribute.value.clusterDim
            assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1)
        else:
            assert attribute.value.programmaticStreamSerializationAllowed == 1
        return (bindings.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr("attngen.runtime.launch.driver", lambda: found)
    launch._encoded.cache_clear()
    return found


def loaded(**fields: Any) -> list[LoadedKernel]:
    (problem,) = resolve.resolve(AttentionSpec(D, **fields), features.scan())
    entries = (render_problem(problem, plan).kernel for plan in plans(problem, "sm_90a"))
    return [LoadedKernel(entry.entry, entry, 0, 132) for entry in entries]


def queries(packed: bool = False) -> Extent:
    heads = HEADS * GROUP
    if packed:
        return Extent(1, TOKENS, heads, D, 0, heads * D, D)
    return Extent(BATCH, QUERIES, heads, D, QUERIES * heads * D, heads * D, D)


NUMBERS = {
    **{"splits": 7, "kv_room": 300, "q_least": 1 << 30, "kv_least": 0},
    **{f"{name}_page_table_stride": 25 for name in "kv"},
    **{
        f"{name}_page_{field}": value
        for name in "kv"
        for field, value in zip(
            ("size", "reciprocal", "shift"), decode.page_numbers(PAGE), strict=True
        )
    },
}
ADDRESSES = {
    name: 256 * (1 + place)
    for place, name in enumerate(
        ("q", "k", "v", "o", "lse", "o_parts", "lse_parts", "q_lengths", "kv_lengths")
        + ("k_page_table", "v_page_table", "q_seqlens", "q_offsets")
    )
}


def started(driver: Driver, kernels: list[LoadedKernel], q: Extent, **changes: int) -> list[dict]:
    """Launches the kernels; the parameters that each got, by name."""
    extents = {"q": q, "k": K, "v": K, "o": q}
    found = []
    for each in kernels:
        scalars = Scalars(0.5, numbers={**NUMBERS, **changes}, sequences=BATCH)
        prepared = launch.prepare(each, extents, scalars)
        launch.launch(prepared, ADDRESSES, 9)
        address = ctypes.c_void_p.from_address(driver.launches[-1][2]).value
        data = ctypes.string_at(address, each.kernel.params_bytes)
        values = struct.unpack_from(launch.pack_format(each.kernel), data)
        found.append({f.name: v for f, v in zip(each.kernel.fields, values, strict=True)})
    return found


def test_launch_paged_decode_has_a_cta_for_tiles_and_splits_and_then_one_for_a_row(driver):
    kernels = loaded(decode=True, layout="paged_kv_bshd_bshd_bshd")
    decode, combine = started(driver, kernels, queries())
    (first, start, _), (second, next_start, _) = driver.launches
    tiles = -(-QUERIES * GROUP // 64)
    assert first == "plain" and start[1:7] == (tiles * HEADS * BATCH, 7, 1, 160, 1, 1)
    assert start[7] == kernels[0].kernel.smem_bytes > 48 << 10
    assert second == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    rows = BATCH * HEADS * GROUP * QUERIES
    spread = DEFAULT.smem_share(-(-rows // 132))  # as leaves SMs equal numbers of CTAs
    assert next_start == (kernels[1].handle, rows, 1, 1, 128, 1, 1, spread, 9)
    assert spread > kernels[1].kernel.smem_bytes
    assert decode["row_tiles"] == tiles and decode["group_size"] == GROUP
    assert decode["total_rows"] == combine["total_rows"] == rows
    assert decode["splits"] == combine["splits"] == 7
    assert combine["q_len"] == QUERIES and combine["heads_q"] == HEADS * GROUP
    assert decode["kv_len"] == 300 and decode["k_page_size"] == PAGE
    for name in ("q", "o", "lse", "o_parts", "lse_parts", "k_page_table", "v_page_table"):
        assert decode[name] == ADDRESSES[name]


def test_launch_page_is_one_copy_of_all_columns_and_streams(driver):
    started(driver, loaded(decode=True, layout="paged_kv_bshd_bshd_bshd")[:1], queries())
    assert driver.boxes == [[64, 8, D // 64, PAGE // 8, 1]] * 2
    promotion = bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
    assert driver.l2 == [promotion] * 2


def test_launch_dense_decode_takes_whole_blocks(driver):
    (kernel, _) = loaded(decode=True, seqused=True)
    started(driver, [kernel], queries())
    assert driver.boxes == [[64, kernel.kernel.block_keys, 1, 1]] * 2


def test_launch_packed_queries_have_a_tile_more_a_sequence(driver):
    kernels = loaded(decode=True, layout="paged_kv_thd_bshd_bshd")
    decode, combine = started(driver, kernels, queries(packed=True))
    tiles = TOKENS * GROUP // 64 + BATCH
    assert driver.launches[0][1][1:4] == (tiles * HEADS, 7, 1)
    assert driver.launches[1][1][1:4] == (TOKENS * HEADS * GROUP, 1, 1)
    assert decode["sequences"] == BATCH and decode["q_len"] == TOKENS
    assert decode["q_seqlens"] == ADDRESSES["q_seqlens"] and combine["q_len"] == TOKENS


def test_launch_ctas_that_leave_hardly_an_sm_free_are_pairs(driver):
    kernels = loaded(decode=True, layout="paged_kv_bshd_bshd_bshd")[:1]
    started(driver, kernels, queries(), splits=10)
    started(driver, kernels, queries(), splits=11)
    assert [how for how, _, _ in driver.launches] == ["plain", PAIRED]
    assert [start[1:3] for _, start, _ in driver.launches] == [(12, 10), (12, 11)]


def test_launch_odd_number_of_tiles_has_no_pairs(driver, monkeypatch):
    monkeypatch.setitem(globals(), "K", K._replace(heads=1))
    one_tile = queries()._replace(seq=3, heads=GROUP)
    started(driver, loaded(decode=True, layout="paged_kv_bshd_bshd_bshd")[:1], one_tile, splits=60)
    ((how, start, _),) = driver.launches
    assert how == "plain" and start[1:4] == (BATCH, 60, 1)


def test_launch_dependent_configuration_is_made_once_for_a_stream(driver, monkeypatch):
    (combine,) = loaded(decode=True)[1:]
    scalars = Scalars(0.5, numbers=NUMBERS, sequences=BATCH)
    prepared = launch.prepare(combine, {"q": queries(), "k": K, "v": K, "o": queries()}, scalars)
    made = []
    make = launch._config
    monkeypatch.setattr(launch, "_config", lambda *of: made.append(of) or make(*of))
    streams = [*range(launch.CONFIGS_KEPT + 1)]
    for stream in (9, 9, *streams, streams[-1]):
        launch.launch(prepared, ADDRESSES, stream)
        assert driver.launches[-1][1][-1] == stream
        assert len(prepared.configs) <= launch.CONFIGS_KEPT
    assert [stream for _, stream, *_ in made] == [9, *(x for x in streams if x != 9)]
    assert driver.launches[0][:2] == driver.launches[1][:2]


def test_launch_more_rows_or_room_than_32_bits_hold_is_refused(driver):
    kernels = loaded(decode=True, layout="paged_kv_bshd_bshd_bshd")[:1]
    long = queries()._replace(seq=1 << 26)
    with pytest.raises(LaunchError, match="queries of a group of heads"):
        started(driver, kernels, long)
    with pytest.raises(LaunchError, match="room for 1073741824 keys"):
        started(driver, kernels, queries(), kv_room=1 << 30)
    started(driver, kernels, queries(), kv_room=(1 << 30) - 1)


def test_workspaces_of_parts_are_there_only_where_keys_are_split():
    kernels, q = loaded(decode=True), queries()
    rows = BATCH * QUERIES * HEADS * GROUP
    scalars = Scalars(1.0, sequences=BATCH)
    offsets, size = lay_out_workspaces(kernels, q, scalars, 7)
    assert offsets == {"o_parts": 0, "lse_parts": 7 * rows * D * 4}
    assert size >= 7 * rows * (D + 1) * 4
    assert lay_out_workspaces(kernels[:1], q, scalars, 1)[1] == 0


@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (7, 2)])
def test_ready_paged_call_knows_its_addresses_and_needs_no_tile_counter(
    driver, monkeypatch, splits, launches
):
    """A counter would be a kernel more in every captured call, which sets it to zero."""
    layout = "paged_kv_bshd_bshd_bshd"
    kernels = tuple(loaded(decode=True, layout=layout))
    monkeypatch.setattr(kernel_choice, "kernels_of", lambda spec, device, choice: kernels)
    monkeypatch.setattr(kernel_choice, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(descriptions, "device_arch", lambda device: "sm_90a")
    q = torch.zeros(BATCH, QUERIES, HEADS * GROUP, D, dtype=torch.bfloat16)
    k = torch.zeros(PAGES, PAGE, HEADS, D, dtype=torch.bfloat16)
    table = torch.zeros(BATCH, 9, dtype=torch.int32)
    given = {"seqused_kv": table[:, 0].contiguous(), "page_table_k": table, "page_table_v": table}
    operands = (q, k, k, *(given.get(name) for name in OPTIONAL))
    ready = forward.find_prepared(operands, Arguments(layout=layout, num_splits=splits))
    assert len(ready.launches) == launches and not ready.counts_tiles
    assert [name for _, name in ready.operands] == ["q", "k", "v", *given]
    assert all(operands[place] is not None for place, _ in ready.operands)
    rows = BATCH * QUERIES * HEADS * GROUP
    assert ready.workspace_bytes >= (splits * rows * (D + 1) * 4 if splits > 1 else 0)
    if splits == 1:
        assert not ready.workspace_bytes
    known = {*ready.fixed, *(name for _, name in ready.operands), *ready.offsets}
    known |= {name for name, _, _ in ready.sources} | {each.name for each in ready.outputs}
    wanted = {name for each in ready.launches for _, name in each.pointers}
    wanted |= {tensor_map.tensor for each in ready.launches for _, tensor_map in each.maps}
    assert wanted <= known


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "asked", "splits"),
    [
        (16, 1, 8192, 0, 1),  # 128 tiles on 132 SMs
        (1, 1, 65536, 0, 13),
        (1, 16, 65536, 0, 13),  # two tiles read the same keys, so that both CTAs of an SM do
        (64, 1, 8192, 0, 1),  # several waves
        (16, 1, 8192, 2, 2),  # what is asked for has the same bits in any batch
        (1, 1, 65536, 1, 1),
    ],
)
def test_choose_joins_what_is_split_alone(batch, queries, keys, asked, splits):
    kernels = loaded(decode=True, seqused=True)
    q = Extent(batch, queries, 64, D, queries * 64 * D, 64 * D, D)
    k = Extent(batch, keys, 8, D, keys * 8 * D, 8 * D, D)
    optional, scalars = dict.fromkeys(OPTIONAL), Scalars(1.0, sequences=batch)
    number = decode.splits_of(kernels[0], {"q": q, "k": k, "v": k}, optional, scalars, asked)
    found, unwritten = kernel_choice.launched(kernels, decode.results_of(number), batch)
    assert number == splits and [*found] == kernels[: 1 + (splits > 1)] and not unwritten


@pytest.mark.parametrize("asked", [0, decode.OWN_NUMBER])
@pytest.mark.parametrize(("batch", "splits"), [(16, 1), (1, 13)])
def test_packed_keys_are_split_as_sequences_of_their_average_length_are(asked, batch, splits):
    reader, *_ = loaded(decode=True, layout="thd")
    q, k = Extent(1, batch, 64, D, 0, 64 * D, D), Extent(1, 65536, 8, D, 0, 8 * D, D)
    ends = TensorDesc.contiguous((batch + 1,), "int32")
    optional = dict.fromkeys(OPTIONAL) | {"cu_seqlens_kv": ends}
    extents, scalars = {"q": q, "k": k, "v": k}, Scalars(1.0, sequences=batch)
    assert decode.splits_of(reader, extents, optional, scalars, asked) == splits
    assert decode.splits_of(reader, extents, optional, scalars, 5) == 5


def test_choose_fills_all_places_where_arithmetic_binds():
    kernels = loaded(decode=True, seqused=True, kv_dtype="e4m3")
    q = Extent(16, 1, 64, D, 64 * D, 64 * D, D)
    k = Extent(16, 8192, 8, D, 8192 * 8 * D, 8 * D, D)
    extents = {"q": q, "k": k, "v": k}
    assert decode.splits_of(kernels[0], extents, dict.fromkeys(OPTIONAL), Scalars(1.0), 0) == 2
