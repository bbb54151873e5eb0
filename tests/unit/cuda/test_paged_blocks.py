"""Blocks of keys on pages, lane by lane as a warp loads them: by the kernels' own code, whose
copies and promised bytes are written down."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen.call.decode import page_numbers
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.runtime.geometry import page_geometry
from attngen.runtime.program import TensorMapRecipe
from attngen.runtime.run_time import Extent

# Keys a block, columns of a head: whole boxes or not.
SHAPES = [(32, 576), (64, 128), (64, 80), (80, 64), (112, 72), (128, 8), (128, 128), (128, 192)]
HEADS, HEAD, FULL, TILE = 6, 5, 77, 1 << 20
STUBS = """
#include "attngen/context.cuh"
#include <vector>
#define ATTNGEN_DEVICE inline
namespace attngen {
struct PageMap { int head_boxes; };
std::vector<int>* copies;
int promised, place;
int forget(int x) { return x; }
int lane_id() { return place; }
void __syncwarp() {}
void mbarrier_arrive_expect(u32 barrier, u32 bytes) { promised += barrier == 77 ? bytes : 1; }
void store_shared_x4(u32 address, const u32*) { copies->push_back(address); }
void fence_async_shared() {}
void tma_load(u32 to, const PageMap*, u32 barrier, int column, int row, int head, int page, u64) {
  for (int x : {int(to), int(barrier), column, row, head, page}) copies->push_back(x);
}
"""
HARNESS = """
template <int kBlock, int kHeadDim>
int load(const void* fetch, int head_boxes, int kv_len, int block, int* out) {
  std::vector<int> found;
  copies = &found, promised = 0;
  for (place = 0; place < 32; ++place) {
    const PageMap map = {head_boxes};
    const PageFetch& pages = *static_cast<const PageFetch*>(fetch);
    const PagedBlocks<kBlock, kHeadDim, PageFetch> blocks(pages, &map, 2, 5, kv_len, place);
    blocks.load(blocks.find(block), 1 << 20, 77, block, 0);
  }
  for (std::size_t i = 0; i < found.size(); ++i) out[i + 1] = found[i];
  out[0] = promised;
  return found.size() / 6;
}
template <int kBlock, int kHeadDim>
int clear(int kv_len, int block, int* out) {
  std::vector<int> found;
  copies = &found;
  for (place = 0; place < 32; ++place) {
    const PageMap map = {0};
    const PagedBlocks<kBlock, kHeadDim, PageFetch> blocks({}, &map, 0, 0, kv_len, place);
    blocks.clear_tail(1 << 20, block);
  }
  for (std::size_t i = 0; i < found.size(); ++i) out[i] = found[i];
  return found.size();
}
}  // namespace attngen
"""


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    fragment = emit_fragment(files.templates_dir(), features.scan()["fetch"]["page_tma"])
    header = (files.include_dir() / "attngen/copy/paged_blocks.cuh").read_text()
    header = header.partition("namespace attngen {")[2].rpartition("}  // namespace")[0]
    header = header.replace("#pragma unroll 1\n", "").replace("#pragma unroll\n", "")
    calls = "".join(
        f'extern "C" int load_{n}_{d}(const void* a, int b, int c, int d, int* e) '
        f"{{ return attngen::load<{n}, {d}>(a, b, c, d, e); }}\n"
        f'extern "C" int clear_{n}_{d}(int a, int b, int* c) '
        f"{{ return attngen::clear<{n}, {d}>(a, b, c); }}\n"
        for n, d in SHAPES
    )
    return ctypes.CDLL(str(compile_cpp(STUBS + fragment + header + HARNESS + calls)))


class PageFetch(ctypes.Structure):
    """The kernels' own: table, its stride, page size, reciprocal and shift."""

    _fields_ = (("table", ctypes.c_void_p), *((name, ctypes.c_int) for name in "abcd"))


def places(block_keys: int, head_dim: int) -> dict[int, tuple[int, int]]:
    """Box and row of each 128 bytes of a block, as products find them: boxes, one after another,
    or groups of 8 rows of boxes where they make up the columns."""
    boxes = -(-head_dim // 64)
    if head_dim % 64:
        return {128 * (block_keys * box + row): (box, row)
                for box in range(boxes) for row in range(block_keys)}  # fmt: skip
    return {128 * (8 * (row // 8 * boxes + box) + row % 8): (box, row)
            for box in range(boxes) for row in range(block_keys)}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_block_is_cleared_behind_the_end_of_its_sequence_alone(library, shape):
    block_keys, head_dim = shape
    place = places(*shape)
    out = np.zeros(8 * len(place), np.int32)
    clear = getattr(library, f"clear_{block_keys}_{head_dim}")
    for kv_len in (0, 1, block_keys - 1, block_keys, block_keys + 5):
        for block in (0, 1):
            count = clear(kv_len, block, out.ctypes.data_as(ctypes.c_void_p))
            rows = min(max(kv_len - block * block_keys, 0), block_keys)
            behind = {at for at, (_, row) in place.items() if row >= rows}
            wanted = {TILE + at + 16 * part for at in behind for part in range(8)}
            assert count == len(wanted) and {*out[:count].tolist()} == wanted


def strides_of(layout: str, size: int, d: int) -> tuple[int, int, int]:
    """Elements from a page, a position, a head to the next."""
    if layout == "heads first":
        return HEADS * size * d, d, size * d
    head = d + 8 * (layout == "padded")
    return size * HEADS * head, HEADS * head, head


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 12, 16, 48, 64, 100, 128, 256, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["positions first", "heads first", "padded"])
def test_paged_block_brings_every_key_once_and_promises_its_bytes(library, shape, size, layout):
    """A block is copied as the launch's map describes it, to where products find it."""
    block_keys, d = shape
    room = 700
    width = -(-room // size)
    table = np.random.default_rng(size).permutation(3 * width).astype(np.int32).reshape(3, width)
    fetch = PageFetch(table.ctypes.data, width, *page_numbers(size))
    page_stride, row_stride, head_stride = strides_of(layout, size, d)
    extent = Extent(3 * width, size, HEADS, d, page_stride, row_stride, head_stride)
    recipe = TensorMapRecipe("map_k", "k", "bf16", 64, block_keys, paged=True)
    dims, strides, boxes, (head_boxes,) = page_geometry(recipe, extent)
    steps = np.array([2, *strides])
    # Of a copy the place of each 128 bytes, one after another.
    within = np.stack(np.unravel_index(np.arange(math.prod(boxes[1:])), boxes[:0:-1]), 1)[:, ::-1]
    stretch = boxes[1] * boxes[3]
    box_of, key_of = np.array(
        [*map(places(*shape).get, range(0, 128 * len(places(*shape)), 128))]
    ).T
    out = np.zeros(1 + 6 * (len(box_of) + 64), np.int32)
    load = getattr(library, f"load_{block_keys}_{d}")
    for kv_len in (0, 1, 63, 64, 65, 333, 700):
        for block in range(-1, -(-room // block_keys) + 1):
            count = load(
                ctypes.byref(fetch), head_boxes, kv_len, block,
                out.ctypes.data_as(ctypes.c_void_p),
            )  # fmt: skip
            keys = min(max(kv_len - block * block_keys, 0), block_keys) if block >= 0 else 0
            brought = -(-keys // stretch) * stretch
            assert count * len(within) == brought * -(-d // 64)
            assert out[0] == 128 * count * len(within) or block < 0
            copies = out[1 : 1 + 6 * count].reshape(-1, 6).astype(np.int64)
            to, barrier, column, row, head, page = copies.T
            start = np.stack([column, row % 8, head, row // 8, page], 1)
            assert (barrier == FULL).all() and (start < dims).all()
            found = (start[:, None, 1:] + within) @ steps[1:] + 2 * column[:, None]
            at = (to[:, None] - TILE) // 128 + np.arange(len(within))
            assert len(np.unique(at)) == at.size and (key_of[at] < max(brought, 1)).all()
            number, place = np.divmod(block * block_keys + key_of[at], size)
            wanted = table[2, np.minimum(number, width - 1)] * page_stride + place * row_stride
            assert (found == 2 * (wanted + HEAD * head_stride + 64 * box_of[at])).all()


@pytest.mark.parametrize("size", [1, 16, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_block_has_the_bytes_it_promises_whether_pages_exist_or_not(library, shape, size):
    """The copy engine writes zeros for those; a block that lacked bytes would be waited for."""
    block_keys, d = shape
    width = -(-700 // size)
    load = getattr(library, f"load_{block_keys}_{d}")
    out = np.zeros(1 + 6 * 4 * (block_keys * -(-d // 64) + 64), np.int32)
    found = []
    for page in (0, -1, 1 << 30):
        table = np.full((3, width), page, np.int32)
        fetch = PageFetch(table.ctypes.data, width, *page_numbers(size))
        for head_boxes in (0, 2):
            pointer = out.ctypes.data_as(ctypes.c_void_p)
            count = load(ctypes.byref(fetch), head_boxes, 650, 650 // block_keys, pointer)
            pages = out[6 : 1 + 6 * count : 6]
            assert len(pages) == count and (pages == page).all()
            found.append((page, head_boxes, count, out[0]))
    by_page = [[each[1:] for each in found if each[0] == page] for page in (0, -1, 1 << 30)]
    assert by_page[0] == by_page[1] == by_page[2]
