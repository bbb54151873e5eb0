"""Blocks of keys on pages, lane by lane as a warp loads them: by the kernels' own code, whose
copies and promised bytes are written down."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen import features, files
from attngen.ops.decode import page_numbers
from attngen.render import emit_fragment

# Keys a block, columns of a head: whole boxes or not.
SHAPES = [(32, 576), (64, 128), (64, 80), (80, 64), (112, 72), (128, 8), (128, 128), (128, 192)]
HEAD, FULL, TILE = 5, 77, 1 << 20
STUBS = """
#include "attngen/context.cuh"
#include <vector>
#define ATTNGEN_DEVICE inline
namespace attngen {
struct PageMap { int head_boxes; };
std::vector<int>* copies;
int promised;
int forget(int x) { return x; }
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
  for (int lane = 0; lane < 32; ++lane) {
    const PageMap map = {head_boxes};
    const PageFetch& pages = *static_cast<const PageFetch*>(fetch);
    const PagedBlocks<kBlock, kHeadDim, PageFetch> blocks(pages, &map, 2, 5, kv_len, lane);
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
  for (int lane = 0; lane < 32; ++lane) {
    const PageMap map = {0};
    const PagedBlocks<kBlock, kHeadDim, PageFetch> blocks({}, &map, 0, 0, kv_len, lane);
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


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 12, 16, 48, 64, 100, 128, 256, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_paged_block_brings_every_key_once_and_promises_its_bytes(library, shape, size, joined):
    """joined: a copy brings all boxes of a head, which are as many from one head to the next."""
    block_keys, head_dim = shape
    boxes, whole = -(-head_dim // 64), head_dim % 64 == 0
    stretch = math.gcd(block_keys & -block_keys, size)
    if joined and not (whole and boxes > 1 and stretch >= 8):
        return  # no such map
    if whole and boxes > 1 and not joined:
        stretch = min(stretch, 8)
    room = 700
    width = -(-room // size)
    table = np.random.default_rng(size).permutation(3 * width).astype(np.int32).reshape(3, width)
    fetch = PageFetch(table.ctypes.data, width, *page_numbers(size))
    place = places(*shape)
    out = np.zeros(1 + 6 * (len(place) + 64), np.int32)
    load = getattr(library, f"load_{block_keys}_{head_dim}")
    for kv_len in (0, 1, 63, 64, 65, 333, 700):
        for block in range(-1, -(-room // block_keys) + 1):
            count = load(
                ctypes.byref(fetch), boxes * joined, kv_len, block,
                out.ctypes.data_as(ctypes.c_void_p),
            )  # fmt: skip
            rows = min(max(kv_len - block * block_keys, 0), block_keys) if block >= 0 else 0
            copies = out[1 : 1 + 6 * count].reshape(count, 6).tolist()
            together = boxes if joined else 1
            if block >= 0:
                assert out[0] == count * together * stretch * 128
            assert count == boxes // together * -(-rows // stretch)
            seen = set()
            for to, barrier, column, row, head, page in copies:
                box, within = place[to - TILE]
                assert (barrier, head) == (FULL, HEAD * (boxes if joined else 1))
                assert column == 64 * box and within % stretch == 0 and within < rows
                position = block * block_keys + within
                assert (page, row) == (table[2, position // size], position % size)
                assert row + stretch <= size and (not joined or box == 0)
                seen.add((box, within))
            assert len(seen) == count
