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
from attngen.render import emit_fragment

SHAPES = [(32, 9), (64, 2), (64, 4), (80, 1), (112, 2), (128, 1), (128, 2), (128, 3)]
HEAD, FULL, TILE = 5, 77, 1 << 20
STUBS = """
#include "attngen/context.cuh"
#include <vector>
#define ATTNGEN_DEVICE inline
namespace attngen {
struct TensorMap {};
std::vector<int>* copies;
int promised;
int forget(int x) { return x; }
void __syncwarp() {}
void mbarrier_arrive_expect(u32 barrier, u32 bytes) { promised += barrier == 77 ? bytes : 1; }
void store_shared_x4(u32 address, const u32*) { copies->push_back(address); }
void fence_async_shared() {}
void tma_load(u32 to, const TensorMap*, u32 barrier, int column, int row, int head, int page, u64) {
  for (int x : {int(to), int(barrier), column, row, head, page}) copies->push_back(x);
}
"""
HARNESS = """
template <int kBlock, int kBoxes>
int load(const int* table, int stride, int size, int batch, int kv_len, int block, int* out) {
  std::vector<int> found;
  copies = &found, promised = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const PageFetch fetch = {table, stride, size};
    const PagedBlocks<kBlock, kBoxes, PageFetch> blocks = {fetch, batch, kv_len, lane};
    blocks.load(blocks.find(block), nullptr, 1 << 20, 77, 5, block, 0);
  }
  for (std::size_t i = 0; i < found.size(); ++i) out[i + 1] = found[i];
  out[0] = promised;
  return found.size() / 6;
}
template <int kBlock, int kBoxes>
int clear(int kv_len, int block, int* out) {
  std::vector<int> found;
  copies = &found;
  for (int lane = 0; lane < 32; ++lane) {
    const PagedBlocks<kBlock, kBoxes, PageFetch> blocks = {{}, 0, kv_len, lane};
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
        f'extern "C" int load_{n}_{boxes}(const int* t, int a, int b, int c, int d, int e, int* f) '
        f"{{ return attngen::load<{n}, {boxes}>(t, a, b, c, d, e, f); }}\n"
        f'extern "C" int clear_{n}_{boxes}(int a, int b, int* c) '
        f"{{ return attngen::clear<{n}, {boxes}>(a, b, c); }}\n"
        for n, boxes in SHAPES
    )
    return ctypes.CDLL(str(compile_cpp(STUBS + fragment + header + HARNESS + calls)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_block_is_cleared_behind_the_end_of_its_sequence_alone(library, shape):
    block_keys, boxes = shape
    out = np.zeros(8 * block_keys * boxes, np.int32)
    clear = getattr(library, f"clear_{block_keys}_{boxes}")
    for kv_len in (0, 1, block_keys - 1, block_keys, block_keys + 5):
        for block in (0, 1):
            count = clear(kv_len, block, out.ctypes.data_as(ctypes.c_void_p))
            rows = min(max(kv_len - block * block_keys, 0), block_keys)
            box, within = np.divmod(out[:count] - TILE, block_keys * 128)
            wanted = {(n, 16 * i) for n in range(boxes) for i in range(8 * rows, 8 * block_keys)}
            assert count == len(wanted)
            assert {*zip(box.tolist(), within.tolist(), strict=True)} == wanted


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 12, 16, 48, 64, 100, 128, 256, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_block_brings_every_key_once_and_promises_its_bytes(library, shape, size):
    block_keys, boxes = shape
    room = 700
    width = -(-room // size)
    table = np.random.default_rng(size).permutation(3 * width).astype(np.int32).reshape(3, width)
    out = np.zeros(1 + 6 * (block_keys * boxes + 64), np.int32)
    load = getattr(library, f"load_{block_keys}_{boxes}")
    stretch = math.gcd(block_keys & -block_keys, size)
    for kv_len in (0, 1, 63, 64, 65, 333, 700):
        for block in range(-1, -(-room // block_keys) + 1):
            count = load(
                table.ctypes.data_as(ctypes.c_void_p), width, size, 2, kv_len, block,
                out.ctypes.data_as(ctypes.c_void_p),
            )  # fmt: skip
            to, barrier, column, row, head, page = out[1 : 1 + 6 * count].reshape(count, 6).T
            rows = min(max(kv_len - block * block_keys, 0), block_keys) if block >= 0 else 0
            if block >= 0:
                assert out[0] == count * stretch * 128
            assert count == boxes * -(-rows // stretch)
            assert (barrier == FULL).all() and (head == HEAD).all()
            box, within = (to - TILE) // (block_keys * 128), (to - TILE) % (block_keys * 128) // 128
            assert (column == 64 * box).all() and (within % stretch == 0).all()
            assert len({*zip(box.tolist(), within.tolist(), strict=True)}) == count
            position = block * block_keys + within
            assert (page == table[2, position // size]).all() and (row == position % size).all()
            assert (row + stretch <= size).all() and (within < max(rows, 1)).all()
