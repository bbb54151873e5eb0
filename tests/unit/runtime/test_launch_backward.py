"""Launching a backward: what each kernel is handed, seen by a driver that starts nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import struct
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from attngen import LaunchError
from attngen.compiler.builder import render_problem
from attngen.kernels.plan import plans
from attngen.runtime import launch, run_time
from attngen.runtime.load import LoadedKernel
from attngen.runtime.parameters import values_of
from attngen.runtime.program import KernelEntry
from attngen.runtime.run_time import UNBOUNDED, Extent, Scalars
from tests.unit.runtime.test_launch import Driver, start_of

ARCH = "sm_90a"
SMS = 132
BATCH, HEADS_Q, HEADS_KV, S_Q, S_KV = 3, 6, 2, 300, 517
SCALARS = Scalars(0.25, 40, 7, bottom_right=True)
TENSORS = ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
POINTERS = ("lse", "dlse", "lse_log2", "d", "dq_acc", "dkv_acc", "turns", "tile_counter", "d_s")
ADDRESSES = {name: 4096 * (n + 1) for n, name in enumerate((*TENSORS, *POINTERS))}
FORMATS = {"i32": "<i", "f32": "<f", "i64": "<q", "ptr": "<Q", "tensor_map": "<Q"}


class Recorder(Driver):
    """Keeps the parameters of any size, and the boxes of tensor maps by address."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[int, tuple[int, ...]] = {}
        self.early = False

    def cuTensorMapEncodeTiled(self, dtype: Any, rank: int, address: int, *rest: Any) -> Any:
        self.boxes[address] = tuple(int(each) for each in rest[2])
        return super().cuTensorMapEncodeTiled(dtype, rank, address, *rest)

    def cuLaunchKernel(self, *arguments: Any) -> Any:
        *start, pointers, _ = arguments
        address = ctypes.c_void_p.from_address(pointers).value
        assert address is not None
        self.launches.append((tuple(start), ctypes.string_at(address, 2048)))
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config: Any, handle: Any, pointers: int, _: int) -> Any:
        (attribute,) = config.attrs
        self.early = attribute.value.programmaticStreamSerializationAllowed == 1
        return self.cuLaunchKernel(*start_of(config, handle), pointers, 0)


def extents(d: int, d_v: int) -> dict[str, Extent]:
    """bshd tensors, contiguous."""

    def make(seq: int, heads: int, dim: int) -> Extent:
        return Extent(BATCH, seq, heads, dim, seq * heads * dim, heads * dim, dim)

    q, k, v = make(S_Q, HEADS_Q, d), make(S_KV, HEADS_KV, d), make(S_KV, HEADS_KV, d_v)
    o = make(S_Q, HEADS_Q, d_v)
    return {"q": q, "k": k, "v": v, "o": o, "d_o": o, "dq": q, "dk": k, "dv": v}


def launched(
    problem: Any, monkeypatch: pytest.MonkeyPatch, d: int, d_v: int
) -> list[tuple[Any, KernelEntry, tuple[Any, ...], dict[str, Any], Recorder]]:
    """Plan, entry, start, parameters by name, and the driver, of each launch."""
    found = []
    for plan in plans(problem, ARCH):
        driver = Recorder()
        monkeypatch.setattr("attngen.runtime.launch.driver", lambda driver=driver: driver)
        launch._encoded.cache_clear()
        entry = render_problem(problem, plan).kernel
        loaded = LoadedKernel("handle", entry, 0, SMS)
        launch.launch(launch.prepare(loaded, extents(d, d_v), SCALARS), ADDRESSES, 5)
        ((start, memory),) = driver.launches
        values = {
            field.name: struct.unpack_from(FORMATS[field.type], memory, field.offset)[0]
            for field in entry.fields
        }
        found.append((plan, entry, start, values, driver))
    return found


CASES = {
    "fused": {"head_dim": 128, "masks": ("causal",)},
    "fused rows deterministic": {"head_dim": 64, "head_dim_v": 40, "deterministic": True},
    "completed": {"head_dim": 64, "masks": ("causal", "window"), "deterministic": True},
    "made": {"head_dim": 128, "masks": ("causal", "window"), "deterministic": True},
    "split": {"head_dim": 192, "head_dim_v": 128, "masks": ("causal", "window")},
}


def up(value: int, step: int) -> int:
    return -(-value // step)


@pytest.mark.parametrize("case", CASES)
def test_launch_each_kernel_of_a_backward_gets_its_values(case, make_problem, monkeypatch) -> None:
    named = CASES[case]
    d, d_v = named["head_dim"], named.get("head_dim_v", named["head_dim"])
    problem = make_problem(**named, direction="bwd")
    for plan, entry, start, values, driver in launched(problem, monkeypatch, d, d_v):
        blocks = up(S_Q, plan.row_block)
        if plan.family == "bwd_prepare":
            grid = (up(blocks, plan.cta_blocks), HEADS_Q, BATCH)
            expected = {"q_blocks": blocks, "q_len": S_Q, "heads_q": HEADS_Q}
            if plan.made_tile:
                expected |= {"group_size": HEADS_Q // HEADS_KV, "main_follows": 1}
            expected |= {"o_stride_row": HEADS_Q * d_v, "d_o_stride_head": d_v}
            expected |= {"o_stride_batch": S_Q * HEADS_Q * d_v}
        elif plan.family == "bwd_convert":
            grid = (blocks * 2, HEADS_Q, BATCH)
            expected = {"q_blocks": blocks, "q_len": S_Q, "heads_q": HEADS_Q, "scale": 0.25}
            expected |= {"dq_stride_row": HEADS_Q * d, "dq_stride_head": d}
        else:
            of_queries = plan.tile_axis == "q"
            along = up(S_Q, plan.tile.m) if of_queries else up(S_KV, plan.tile.n)
            heads = BATCH * (HEADS_Q if of_queries else HEADS_KV)
            grid = (min(SMS, along * heads), 1, 1)
            expected = {
                "tiles": along * heads,
                "q_tiles" if of_queries else "kv_blocks": along,
                "q_blocks": blocks,
                "heads_q": HEADS_Q,
                "heads_kv": HEADS_KV,
                "total_heads": heads,
                "tail_rows": along // plan.schedule.tail_share if plan.schedule.tail_share else 0,
                "group_size": HEADS_Q // HEADS_KV,
                "bottom_right": 1,
                "scale": 0.25,
                "scale_log2": pytest.approx(0.25 * 1.4426950408889634),
                "kv_len": S_KV,
                "q_len": S_Q,
            }
            expected |= {"window_left": 40, "window_right": 7} if "window" in problem.masks else {}
            # All fit into L2, as whole groups of query heads.
            together = min(heads, plan.schedule.group_heads) if plan.completes else heads
            expected["heads_per_group"] = 15 if of_queries else together
            rows = {"q": plan.tile.m, "k": plan.tile.n, "v": plan.tile.n, "d_o": plan.tile.m}
            rows |= dict.fromkeys(("dq",) if of_queries else ("dk", "dv"), 64)
            rows |= {"dq": 64} if plan.completes else {}
            rows |= {"o": plan.tile.m} if plan.makes_d else {}
            boxes = {ADDRESSES[name]: (64, n, 1, 1) for name, n in rows.items()}
            if plan.family == "sm90_bwd_dq_kept":
                unread = ("q_blocks", "heads_kv", "scale_log2")
                expected = {name: expected[name] for name in expected if name not in unread}
                expected |= {"kept_rows": 0, "heads_before": 0, "dq_stride_row": HEADS_Q * d}
                boxes = {ADDRESSES["k"]: (64, 64, 1, 1)}
            assert driver.boxes == boxes
        pointers = {name: ADDRESSES[name] for name in values if name in ADDRESSES}
        maps = {name: ADDRESSES[name[4:]] for name in values if name.startswith("map_")}
        assert start[1:4] == grid and start[4] == plan.threads
        assert start[7] == entry.smem_bytes and start[8] == 5
        assert driver.early == (plan.family in ("sm90_bwd", "sm90_bwd_dkv"))
        for name, value in {**pointers, **maps, **expected}.items():
            assert values[name] == value, f"{plan.family}: {name}"


@pytest.mark.parametrize("case", CASES)
def test_workspaces_hold_whole_blocks_and_are_one_size_in_a_set(case, make_problem) -> None:
    problem = make_problem(**CASES[case], direction="bwd")
    q = extents(problem.head_dim_qk, problem.head_dim_v)["q"]
    known: dict[str, int] = {}
    for plan in plans(problem, ARCH):
        entry = render_problem(problem, plan).kernel
        sizes = run_time.workspace_bytes(entry, q)
        assert [*sizes] == [*entry.workspace]
        assert all(known.setdefault(name, size) == size for name, size in sizes.items())
    blocks = BATCH * HEADS_Q * up(S_Q, plan.row_block)
    wanted = dict.fromkeys(("lse_log2", "d"), 4 * plan.row_block * blocks) | {"tile_counter": 4}
    if case != "split":  # columns of dQ in shares of 64, or all of them
        wanted["dq_acc"] = 4 * plan.row_block * problem.head_dim_qk * blocks
        wanted["turns"] = 4 * blocks
    if case == "split":  # of dS where a call keeps them
        wanted["d_s"] = 0
    if case.startswith("fused"):  # for calls with few tiles
        wanted["dkv_acc"] = 0
    assert known == wanted


def test_launch_many_heads_are_grouped_by_what_they_share(make_problem) -> None:
    """Tiles of keys share queries, output gradients and sums of dQ; long ones fill L2 sooner."""
    problem = make_problem(128, masks=("causal",), direction="bwd")
    _, fused, _ = (render_problem(problem, each).kernel for each in plans(problem, ARCH))
    sizes = extents(128, 128)
    long = {name: extent._replace(seq=16384) for name, extent in sizes.items()}
    # 3 query heads a group, 16384 positions of 256 + 256 + 512 bytes: 48 MiB.
    assert run_time.heads_per_group(fused, long) == 1
    assert run_time.heads_per_group(fused, {**sizes, "k": sizes["k"]._replace(batch=99)}) == 16


def test_launch_heads_under_a_window_are_grouped_by_what_it_sees(make_problem) -> None:
    """Tiles in an order follow the window, for each of three query heads where four others fit."""
    problem = make_problem(128, masks=("causal", "window"), direction="bwd", deterministic=True)
    _, fused = (render_problem(problem, each).kernel for each in plans(problem, ARCH))
    sizes = {name: extent._replace(seq=16384) for name, extent in extents(128, 128).items()}
    sizes["k"] = sizes["k"]._replace(batch=99)
    # Positions of 256 + 256 + 512 bytes, 8 MiB of which are worked on together.
    found = [run_time.heads_per_group(fused, sizes, keys) for keys in (256, 512, 1024, 2048, 4096)]
    assert found == [4, 4, 4, 4, 2]
    assert run_time.heads_per_group(fused, sizes) == 1  # of all keys


HEADS_TOGETHER = """
#define ATTNGEN_DEVICE inline
#include "attngen/scheduler/sequence_order.cuh"
namespace attngen {
struct Params { int window_left, window_right, group_size, heads_kv; };
%s
}
extern "C" int heads(int left, int right, int group_size, int heads_kv, int length) {
  return attngen::key_heads_together({left, right, group_size, heads_kv}, length);
}
"""


@pytest.mark.parametrize("head_dim", [64, 128])
def test_launch_heads_beside_lengths_are_as_many_as_of_equal_ones(
    head_dim, make_problem, compile_cpp
) -> None:
    masks = {"masks": ("causal", "window"), "direction": "bwd", "deterministic": True}
    dense = make_problem(head_dim, **masks)
    packed = dataclasses.replace(dense, q_seq="packed", kv_seq="packed")
    kernel = render_problem(dense, plans(dense, ARCH)[1]).kernel
    functions = {
        re.search(r"ATTNGEN_DEVICE int key_heads_together.*?\n}\n", source.text, re.DOTALL)[0]
        for each in plans(packed, ARCH)
        if "bwd_prepare" != each.family
        for source in [render_problem(packed, each)]
    }
    (function,) = functions  # the kernel that orders many sequences, and the main one, agree
    heads = ctypes.CDLL(str(compile_cpp(HEADS_TOGETHER % function))).heads
    sizes = extents(head_dim, head_dim)
    windows = [(40, 0), (512, 0), (300, 300), (2048, 0), (UNBOUNDED, 0), (UNBOUNDED, UNBOUNDED)]
    for length, groups, of_keys, (left, right) in itertools.product(
        (1, 100, 600, 4096, 100_000), (1, 4), (1, 8, 64), windows
    ):
        sizes["q"] = sizes["q"]._replace(seq=length, heads=groups * of_keys, batch=1)
        sizes["k"] = sizes["k"]._replace(heads=of_keys, batch=1)
        wanted = run_time.heads_per_group(kernel, sizes, left + right)
        assert heads(left, right, groups, of_keys, length) == wanted


@pytest.mark.parametrize("change", ["heads", "batch"])
def test_more_than_an_axis_of_a_grid_holds_are_all_in_the_first(change, make_problem, monkeypatch):
    """But by a kernel of an earlier version, which cannot tell them apart there."""
    monkeypatch.setattr("attngen.runtime.launch.driver", lambda: Recorder())
    problem = make_problem(64, direction="bwd")
    kernels = [
        render_problem(problem, each).kernel
        for each in plans(problem, ARCH)
        if each.family in ("bwd_prepare", "bwd_convert")
    ]
    assert len(kernels) == 2
    for kernel, count in itertools.product(kernels, (launch.GRID_LIMIT, launch.GRID_LIMIT + 1)):
        many = {each: x._replace(**{change: count}) for each, x in extents(64, 64).items()}
        values = values_of(kernel, many, SCALARS)
        blocks = -(-values["q_blocks"] // kernel.cta_blocks) * kernel.block_ctas
        q = many["q"]
        axes = (blocks, q.heads, q.batch)
        if count > launch.GRID_LIMIT:
            axes = (blocks * q.heads * q.batch, 1, 1)
        prepared = launch.prepare(LoadedKernel("handle", kernel, 0, SMS), many, SCALARS)
        assert prepared.start[1:4] == axes
    old = LoadedKernel("handle", dataclasses.replace(kernels[0], folds=False), 0, SMS)
    with pytest.raises(LaunchError, match="65536 .* takes at most 65535"):
        launch.prepare(old, many, SCALARS)


def test_more_ctas_than_a_grid_holds_are_refused(make_problem, monkeypatch):
    monkeypatch.setattr("attngen.runtime.launch.driver", lambda: Recorder())
    problem = make_problem(64, direction="bwd")
    prepare, *_ = plans(problem, ARCH)
    loaded = LoadedKernel("handle", render_problem(problem, prepare).kernel, 0, SMS)
    many = {each: x._replace(heads=1 << 16, batch=1 << 15) for each, x in extents(64, 64).items()}
    with pytest.raises(LaunchError, match="this kernel takes at most 2147483647"):
        launch.prepare(loaded, many, SCALARS)
