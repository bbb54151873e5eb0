"""Rows that a warp copies, lane by lane: by the kernels' own code, whose shared memory is written
down and whose reads are checked against what they may touch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attngen.io import files

SHAPES = [(16, 64), (32, 128), (48, 64), (64, 48), (80, 112), (128, 128), (176, 32), (256, 64)]
STUBS = """
#include "attngen/platform.cuh"
#include <cstring>
#define ATTNGEN_DEVICE inline
namespace attngen {
unsigned char* memory;
const char* lowest;
const char* highest;
int faults, arrivals;
int forget(int x) { return x; }
void read(const void* from, int bytes, int aligned) {
  const char* at = static_cast<const char*>(from);
  faults += bytes > 0 && (at < lowest || at + bytes > highest);
  faults += bytes > 0 && reinterpret_cast<u64>(from) % aligned;
}
template <int kBytes> void copy_async(u32 to, const void* from, bool there) {
  read(from, there ? kBytes : 0, kBytes);
  faults += to % kBytes;
  std::memset(memory + to, 0, kBytes);
  if (there) std::memcpy(memory + to, from, kBytes);
}
void store_shared_16(u32 to, u32 word) { std::memcpy(memory + to, &word, 2); }
void await_copies() {}
void store_shared_x4(u32 to, const u32* words) { std::memcpy(memory + to, words, 16); }
void mbarrier_arrive(u32 barrier) { arrivals += barrier == 77; }
void arrive_after_copies(u32 barrier) { arrivals += barrier == 77; }
"""
HARNESS = """
template <int kColumns, int kRows>
int gather(void* tensor, long long offset, long long row, long long column, int rows, int columns,
           int first, int elements, unsigned char* out, int* unit) {
  memory = out, faults = arrivals = 0;
  lowest = static_cast<const char*>(tensor), highest = lowest + 2 * elements;
  const GatheredRows from = gathered_rows(tensor, 1, 0, 0, offset, 0, row, column, rows, columns);
  *unit = from.unit();
  for (int lane = 0; lane < 32; ++lane) {
    gather_tile<kColumns, kRows>(0, kRows * 128, from, first, 77, lane);
  }
  return faults * 100 + arrivals;
}
}  // namespace attngen
"""


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    header = (files.include_dir() / "attngen/copy/gathered_rows.cuh").read_text()
    header = header.partition("namespace attngen {")[2].rpartition("}  // namespace")[0]
    header = header.replace("#if defined(__CUDACC__)", "#if 1")
    calls = "".join(
        f'extern "C" int gather_{d}_{n}(void* a, long long b, long long c, long long e, int f, '
        "int g, int h, int i, unsigned char* j, int* k) "
        f"{{ return attngen::gather<{d}, {n}>(a, b, c, e, f, g, h, i, j, k); }}\n"
        for d, n in SHAPES
    )
    header = "\n".join(line for line in header.splitlines() if not line.startswith("#pragma"))
    return ctypes.CDLL(str(compile_cpp(STUBS + header + HARNESS + calls)))


def swizzled(tile: np.ndarray) -> np.ndarray:
    """Rows of whole boxes of 64 columns as products read them."""
    rows, columns = tile.shape
    found = np.zeros((columns // 64, rows, 8, 8), np.uint16)
    boxes = tile.reshape(rows, columns // 64, 8, 8)
    for row, box, piece in itertools.product(range(rows), range(columns // 64), range(8)):
        found[box, row, piece ^ row % 8] = boxes[row, box, piece]
    return found.ravel()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("less", "start", "pad", "apart"),
    [
        (0, 0, 0, 1), (0, 8, 0, 1), (0, 4, 0, 1), (0, 2, 4, 1), (0, 1, 0, 1), (0, 0, 4, 1),
        (0, 0, 2, 1), (0, 0, 1, 1), (0, 0, 0, 2), (3, 0, 3, 1), (4, 0, 0, 1), (5, 0, 1, 1),
        (7, 0, 0, 1), (14, 6, 0, 1), (15, 0, 0, 3),
    ],
)  # fmt: skip
def test_gathered_tile_is_the_rows_and_zeros_around_them(library, shape, less, start, pad, apart):
    """less: columns that the rows lack of the tile's; start: elements before the first row; pad:
    between rows; apart: from column to column."""
    tile_columns, tile_rows = shape
    columns, rows = tile_columns - less, tile_rows + 37
    stride = columns * apart + pad
    places = 2 * start | 2 * stride | 16
    unit = 2 if apart > 1 else places & -places
    elements = start + (rows - 1) * stride + (columns - 1) * apart + 1
    held = np.random.default_rng(1).integers(1, 65535, elements + 8).astype(np.uint16)
    aligned = -held.ctypes.data // 2 % 8  # elements to a multiple of 16 bytes
    tensor = held[aligned : aligned + elements]
    boxes = -(-tile_columns // 64)
    for first, count in ((0, rows), (tile_rows - 5, rows), (0, 3), (16, 17), (0, 0), (64, 1)):
        wanted = np.zeros((tile_rows, boxes * 64), np.uint16)
        for i, j in itertools.product(range(tile_rows), range(columns)):
            if first + i < count:
                wanted[i, j] = tensor[start + (first + i) * stride + j * apart]
        out = np.zeros(boxes * tile_rows * 64, np.uint16)
        found = ctypes.c_int()
        result = getattr(library, f"gather_{tile_columns}_{tile_rows}")(
            tensor.ctypes.data_as(ctypes.c_void_p), ctypes.c_longlong(start),
            ctypes.c_longlong(stride), ctypes.c_longlong(apart), count, columns, first, elements,
            out.ctypes.data_as(ctypes.c_void_p), ctypes.byref(found),
        )  # fmt: skip
        assert found.value == unit
        assert result == 32, "a read outside the rows, or one that is not aligned"
        assert np.array_equal(out, swizzled(wanted)), (first, count)


def test_gathered_tile_leaves_the_rest_of_its_boxes_alone(library):
    """Columns past the tile's are in no product, and are not written."""
    tensor = np.ones((64, 48), np.uint16)
    out = np.full(64 * 64, 7, np.uint16)
    library.gather_48_64(
        tensor.ctypes.data_as(ctypes.c_void_p), ctypes.c_longlong(0), ctypes.c_longlong(48),
        ctypes.c_longlong(1), 64, 48, 0, tensor.size, out.ctypes.data_as(ctypes.c_void_p),
        ctypes.byref(ctypes.c_int()),
    )  # fmt: skip
    assert (out == 1).sum() == 64 * 48 and (out == 7).sum() == 64 * 16
