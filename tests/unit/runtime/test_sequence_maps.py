"""Tensor maps of sequences: the rows of a box that belong to its sequence are found, no others."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from attngen import AttentionSpec
from attngen.call.operands import extent
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.runtime import launch
from attngen.runtime.geometry import LONGEST, geometry_of
from attngen.runtime.load import LoadedKernel
from attngen.runtime.parameters import values_of
from attngen.runtime.run_time import Extent, Scalars
from attngen.spec.problem import DTYPE_BYTES
from attngen.spec.resolve import resolve

ADDRESSES = 1 << 64
ROOM, BATCH, HEADS, DIM = 7, 3, 2, 8
LENGTHS = (0, 3, ROOM)
FORMATS = {
    "bshd": (BATCH, ROOM, HEADS, DIM),
    "sbhd": (ROOM, BATCH, HEADS, DIM),
    "bhsd": (BATCH, HEADS, ROOM, DIM),
}


def forward_kernel(layout: str, seqused: bool = False):
    """The launch of a forward whose lengths vary."""
    spec = AttentionSpec(head_dim=64, layout=layout, seqused=seqused)
    (problem,) = resolve(spec, features.scan())
    _, main, *_ = plans(problem, "sm_90a")
    return render_problem(problem, main).kernel


def address(kernel, name: str, where: Extent, row: int, head: int, length: int, start: int):
    """Bytes from the tensor to the row of a box that starts at row 0 of a sequence, as the copy
    engine counts them; None where it sees nothing there."""
    recipe = next(each for each in kernel.tensor_maps if each.tensor == name)
    dims, strides, _, units = geometry_of(kernel, recipe, where)
    shift = length * units[0] + start * units[1]
    place = (LONGEST - length + row, head, shift, LONGEST)
    assert all(stride % 16 == 0 and 0 <= stride < 1 << 40 for stride in strides)
    assert all(0 < size <= 1 << 32 for size in dims)
    if not all(0 <= x < size for x, size in zip(place, dims[1:], strict=True)):
        return None
    return sum(x * stride for x, stride in zip(place, strides, strict=True)) % ADDRESSES


def strided_views():
    """Dense operands as calls have them: whole, packed, cut out of something larger."""
    for axes, shape in FORMATS.items():
        yield axes, torch.empty(shape, dtype=torch.bfloat16)
        yield axes, torch.empty(*shape[:-2], 3, *shape[-2:], dtype=torch.bfloat16).select(-3, 1)
        larger = torch.empty(*(n + 2 for n in shape[:-1]), DIM + 16, dtype=torch.bfloat16)
        yield axes, larger[1:-1, 1:-1, 1:-1, 8:-8]


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_used_map_finds_exactly_the_rows_in_use(name):
    kernel = forward_kernel("bshd", seqused=True)
    assert DTYPE_BYTES[kernel.tensor_maps[0].dtype] == 2
    for axes, view in strided_views():
        where = extent(view, axes)
        for b, head, length in itertools.product(range(BATCH), range(HEADS), LENGTHS):
            for row in range(ROOM + 70):
                found = address(kernel, name, where, row, head, length, b)
                offset = b * where.stride_batch + head * where.stride_heads + row * where.stride_seq
                assert found == (2 * offset if row < length else None)


def test_packed_map_finds_exactly_the_rows_of_a_sequence():
    kernel = forward_kernel("thd")
    for tensor in (torch.empty(40, HEADS, DIM), torch.empty(40, 3, HEADS, DIM)[:, 1]):
        where = extent(tensor.bfloat16() if tensor.is_contiguous() else tensor, "thd")
        for start, length in ((0, 0), (0, 40), (5, 3), (39, 1), (40, 0)):
            for row, head in itertools.product(range(80), range(HEADS)):
                found = address(kernel, "k", where, row, head, length, start)
                offset = head * where.stride_heads + (start + row) * where.stride_seq
                assert found == (2 * offset if row < length else None)


def test_map_of_a_tensor_expanded_along_its_positions_finds_the_one_row_it_has():
    for layout, used, shape in (("thd", False, (40, HEADS, DIM)), ("bshd", True, FORMATS["bshd"])):
        kernel = forward_kernel(layout, seqused=used)
        where = extent(torch.empty(HEADS, DIM, dtype=torch.bfloat16).expand(shape), layout)
        for row, head, start in itertools.product(range(9), range(HEADS), range(BATCH)):
            found = address(kernel, "k", where, row, head, 5, start)
            assert found == (2 * head * where.stride_heads if row < 5 else None)


def test_map_of_a_dense_side_beside_packed_queries_is_a_plain_one():
    kernel = forward_kernel("thd_bshd_bshd")
    types = {field.name: field.type for field in kernel.fields if field.name.startswith("map_")}
    assert types == {
        "map_q": "sequence_map", "map_k": "tensor_map", "map_v": "tensor_map",
        "map_o": "sequence_map",
    }  # fmt: skip


def test_map_units_follow_the_encoded_map():
    assert struct.calcsize("<2i56x") == 64


@pytest.mark.parametrize(("gigabytes", "fits"), [(8, True), (17, False), (1 << 10, False)])
def test_map_of_rows_too_far_apart_is_refused(gigabytes, fits):
    kernel = forward_kernel("thd")
    near = Extent(1, 2, 1, 64, 0, 64, 64)
    far = near._replace(stride_seq=gigabytes << 29)
    loaded = LoadedKernel("handle", kernel, 0, 132)
    scalars = Scalars(1.0, numbers={"q_least": 0, "kv_least": 0}, sequences=1)
    found = launch._violations(
        loaded, extents := {"q": near, "k": far, "v": near, "o": near},
        values_of(kernel, extents, scalars),
    )  # fmt: skip
    assert len(found) == (not fits) and all("out of the copy engine's reach" in x for x in found)


def test_map_whose_strides_share_no_step_is_refused():
    kernel = forward_kernel("bshd", seqused=True)
    where = Extent(1 << 20, 1 << 20, 1, 64, (1 << 20) + 8, 64 * 1024 + 8, 64)
    recipe = next(each for each in kernel.tensor_maps if each.tensor == "q")
    assert geometry_of(kernel, recipe, where).sizes[3] > 1 << 31
