"""Tiles that scores read: where a stage has its chunks, and what may be copied at a time."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from attngen.call import bias
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
