"""Tiles that scores read: where a stage has its chunks, and what may be copied at a time."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from attngen.call import bias
from attngen.io import files
from attngen.kernels.base import score_tile_bytes
from attngen.runtime.run_time import UNBOUNDED

SHAPES = [(16, n) for n in range(16, 129, 16)] + [(m, 16) for m in (32, 48, 64, 128)]
SOURCE = """
#include "attngen/mma/score_tile.cuh"
using namespace attngen;
template <int kRows, int kColumns>
int fill(int* offsets) {
  using Stage = TileStage<kRows, kColumns>;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < Stage::kChunks; ++chunk) {
      offsets[row * Stage::kChunks + chunk] = Stage::offset(row, chunk);
    }
  }
  return Stage::kBytes;
}
extern "C" int unit(long long first, long long stride_row, long long stride_column) {
  const auto* place = reinterpret_cast<const unsigned short*>(first);
  return TileSource{place, stride_row, stride_column, 1, 1}.unit();
}
"""
ENTRIES = "".join(
    f'extern "C" int fill_{m}_{n}(int* offsets) {{ return fill<{m}, {n}>(offsets); }}\n'
    for m, n in SHAPES
)


@pytest.fixture(scope="module")
def library(compile_cpp) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_cpp(SOURCE + ENTRIES)))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_stage_chunks_have_places_of_their_own_in_its_bytes(library, rows, columns) -> None:
    offsets = np.zeros((rows, columns // 8), np.int32)
    size = getattr(library, f"fill_{rows}_{columns}")(ctypes.c_void_p(offsets.ctypes.data))
    assert size == score_tile_bytes(rows, columns), "as the plan counts them"
    places = set(offsets.ravel().tolist())
    assert len(places) == offsets.size and not any(place % 16 for place in places)
    assert min(places) >= 0 and max(places) <= size - 16


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_stage_matrices_are_read_from_all_banks_at_once(library, rows, columns) -> None:
    """Eight rows of a chunk, which one phase of ldmatrix reads."""
    offsets = np.zeros((rows, columns // 8), np.int32)
    getattr(library, f"fill_{rows}_{columns}")(ctypes.c_void_p(offsets.ctypes.data))
    for row, chunk in itertools.product(range(0, rows, 8), range(columns // 8)):
        assert len(set(offsets[row : row + 8, chunk] % 128)) == 8


@pytest.mark.parametrize(
    ("first", "stride_row", "stride_column", "unit"),
    [
        (0, 64, 1, 16), (32, 8, 1, 16), (16, 0, 1, 16), (0, 10, 1, 4), (4, 64, 1, 4),
        (0, 7, 1, 2), (2, 8, 1, 2), (0, 64, 2, 2), (0, 64, 0, 2),
    ],
)  # fmt: skip
def test_copies_are_as_large_as_every_row_allows(
    library, first, stride_row, stride_column, unit
) -> None:
    library.unit.argtypes = [ctypes.c_longlong] * 3
    assert library.unit(first, stride_row, stride_column) == unit


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 5, 7), (2, 1, 1, 7), (5, 7), (7,), (1,)])
def test_numbers_of_a_bias_find_its_elements(shape) -> None:
    tensor = torch.arange(2.0 * 3 * 5 * 7)[: int(np.prod(shape))].view(shape)
    found = bias.numbers_of(tensor)
    full = tensor.expand(2, 3, 5, 7)
    for place in ((0, 0, 0, 0), (1, 2, 4, 6), (1, 0, 3, 2)):
        strides = [found[f"bias_stride_{axis}"] for axis in bias.AXES]
        assert tensor.flatten()[int(np.dot(place, strides))] == full[place]
    sizes = [found[f"bias_{axis}s"] for axis in bias.AXES]
    assert [1 if n == UNBOUNDED else n for n in sizes] == list(bias.sizes_of(shape))


# What lanes do with a tile, whose shared memory is written down and whose reads are checked against
# what they may touch: a copy reads all of its bytes.
STUBS = """
#include "attngen/platform.cuh"
#include <cstring>
#define ATTNGEN_DEVICE inline
namespace attngen {
struct TensorMap;
unsigned char* memory;
const char* lowest;
const char* highest;
int faults, arrivals;
constexpr u64 kEvictNormal = 0;
void read(const void* from, int bytes, int aligned) {
  const char* at = static_cast<const char*>(from);
  faults += bytes > 0 && (at < lowest || at + bytes > highest);
  faults += bytes > 0 && reinterpret_cast<u64>(from) % aligned;
}
template <int kBytes, bool kKeep = false> void copy_async(u32 to, const void* from, bool there) {
  read(from, there ? kBytes : 0, kBytes);
  faults += to % kBytes;
  std::memset(memory + to, 0, kBytes);
  if (there) std::memcpy(memory + to, from, kBytes);
}
void store_shared_16(u32 to, u32 word) { std::memcpy(memory + to, &word, 2); }
void store_shared_x4(u32 to, const u32* words) { std::memcpy(memory + to, words, 16); }
void await_copies() {}
void mbarrier_arrive(u32 barrier) { arrivals += barrier == 77; }
void arrive_after_copies(u32 barrier) { arrivals += barrier == 77; }
void tma_load(u32, const TensorMap*, u32, int, int, int, int, u64) {}
void load_matrix_x4(u32*, u32) {}
void load_matrix_transposed_x4(u32*, u32) {}
"""
COPIES = """
template <int kRows, int kColumns>
int copied(bool gathers, void* tensor, long long start, long long row, long long column, int rows,
           int columns, int first_row, int first_column, int elements, unsigned char* out) {
  memory = out, faults = arrivals = 0;
  lowest = static_cast<const char*>(tensor), highest = lowest + 2 * elements;
  const TileSource from = {static_cast<const unsigned short*>(tensor) + start, row, column, rows,
                           columns};
  const TileStage<kRows, kColumns> stage = {0};
  for (int lane = 0; lane < 32; ++lane) {
    if constexpr (kColumns % 64 == 0) {
      if (gathers) stage.gather(from, first_row, first_column, row == 0 ? 1 : kRows, 77, lane);
    }
    if (!gathers) stage.fetch(from, first_row, first_column, lane);
  }
  return faults * 100 + arrivals;
}
}  // namespace attngen
"""
COPIED = [(16, 64), (32, 96), (16, 128), (64, 16), (32, 48)]


@pytest.fixture(scope="module")
def copies(compile_cpp) -> ctypes.CDLL:
    header = (files.include_dir() / "attngen/mma/score_tile.cuh").read_text()
    header = header.partition("namespace attngen {")[2].rpartition("}  // namespace")[0]
    header = header.replace("#if defined(__CUDACC__)", "#if 1")
    header = "\n".join(line for line in header.splitlines() if not line.startswith("#pragma"))
    entries = "".join(
        f'extern "C" int copied_{m}_{n}(bool a, void* b, long long c, long long d, long long e, '
        "int f, int g, int h, int i, int j, unsigned char* k) "
        f"{{ return attngen::copied<{m}, {n}>(a, b, c, d, e, f, g, h, i, j, k); }}\n"
        for m, n in COPIED
    )
    return ctypes.CDLL(str(compile_cpp(STUBS + header + COPIES + entries)))


def chunk_offset(rows: int, columns: int, row: int, chunk: int) -> int:
    """Where a chunk of 8 elements of a row lies in the stage, in bytes."""
    box_chunks = 2 if columns == 16 else 8
    turned = chunk ^ (row >> 2 & 1) if columns == 16 else (chunk ^ row) & 7
    return chunk // box_chunks * rows * box_chunks * 16 + (row * box_chunks + turned) * 16


@pytest.mark.parametrize(
    ("gathers", "shape"), [*((False, x) for x in COPIED), *((True, x) for x in COPIED[:3:2])]
)
@pytest.mark.parametrize(
    ("columns", "start", "pad", "apart"),
    [
        (200, 0, 0, 1), (201, 0, 7, 1), (203, 8, 5, 1), (204, 0, 4, 1), (202, 2, 0, 1),
        (77, 0, 1, 1), (77, 0, 3, 1), (77, 1, 0, 1), (9, 0, 7, 1), (70, 0, 0, 2), (133, 4, -133, 1),
        (134, 0, -134, 1), (133, 0, -133, 1),
    ],
)  # fmt: skip
def test_copied_tile_is_the_elements_and_zeros_around_them(
    copies, gathers, shape, columns, start, pad, apart
) -> None:
    """start: elements before the first; pad: between rows, which are all one where nothing lies
    between their beginnings; apart: from column to column. The memory ends with the last one."""
    tile_rows, tile_columns = shape
    rows, stride = tile_rows + 3, columns * apart + pad
    reach = (rows - 1) * stride + (columns - 1) * apart + 1
    held = np.random.default_rng(1).integers(1, 65535, start + reach + 8).astype(np.uint16)
    aligned = -held.ctypes.data // 2 % 8  # elements to a multiple of 16 bytes
    tensor = held[aligned : aligned + start + reach]
    firsts = range(0, columns, tile_columns)
    for row, column in itertools.product((0, 16), {firsts[0], firsts[-1]}):
        size = score_tile_bytes(tile_rows, tile_columns)
        out = np.full(size, 7, np.uint8)
        result = getattr(copies, f"copied_{tile_rows}_{tile_columns}")(
            ctypes.c_bool(gathers), ctypes.c_void_p(tensor.ctypes.data), ctypes.c_longlong(start),
            ctypes.c_longlong(stride), ctypes.c_longlong(apart), rows, columns, row, column,
            len(tensor), ctypes.c_void_p(out.ctypes.data),
        )  # fmt: skip
        assert result == (32 if gathers else 0), "a read outside, or one that is not aligned"
        for i, chunk in itertools.product(
            range(1 if stride == 0 else tile_rows), range(tile_columns // 8)
        ):
            at = chunk_offset(tile_rows, tile_columns, i, chunk)
            places = start + (row + i) * stride + (column + chunk * 8 + np.arange(8)) * apart
            inside = (column + chunk * 8 + np.arange(8) < columns) & (row + i < rows)
            wanted = np.where(inside, tensor[np.where(inside, places, 0)], 0)
            assert np.array_equal(out[at : at + 16].view(np.uint16), wanted), (row + i, chunk)
