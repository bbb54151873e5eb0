"""Tiles of 8 bits widened to 16: the places that threads read and write, by the kernels' own code,
and what the reference makes of such keys and values."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attngen.io import files
from attngen.reference import attention, fp8

SHAPES = [(32, 576, 256), (64, 128, 128), (128, 64, 128), (64, 16, 128), (64, 80, 128)]
HARNESS = """
#include "attngen/mma/widen.cuh"
template <int kRows, int kColumns, int kThreads>
int places(int* out) {
  using namespace attngen;
  int count = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    const WideningShare<kRows, kColumns, kThreads> share(thread);
    for (int n = 0; n < share.kShare; ++n) {
      if (!share.has(n)) continue;
      const int slot = share.chunk(n);
      constexpr u32 kBoxBytes = kRows * 128;
      const int found[] = {thread, share.row, slot, int(swizzled_slot<kBoxBytes>(share.row, slot)),
                           int(swizzled_slot<kBoxBytes>(share.row, 2 * slot)),
                           int(swizzled_slot<kBoxBytes>(share.row, 2 * slot + 1))};
      for (int x : found) *out++ = x;
      ++count;
    }
  }
  return count;
}
"""


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    calls = "".join(
        f'extern "C" int places_{"_".join(map(str, shape))}(int* out) '
        f"{{ return places<{', '.join(map(str, shape))}>(out); }}\n"
        for shape in SHAPES
    )
    assert (files.include_dir() / "attngen/mma/widen.cuh").exists()
    return ctypes.CDLL(str(compile_cpp(HARNESS + calls)))


def swizzled(box_rows: int, row: int, byte: int) -> int:
    """Where the copy engine lays a byte of a row: 16-byte units of a box by the row, modulo 8."""
    box, within = divmod(byte, 128)
    return box * box_rows * 128 + row * 128 + (within // 16 ^ row % 8) * 16 + within % 16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_widening_every_chunk_is_moved_once_to_where_a_product_finds_it(library, shape):
    rows, columns, _ = shape
    out = np.zeros((rows * columns, 6), np.int32)
    name = "places_" + "_".join(map(str, shape))
    count = getattr(library, name)(out.ctypes.data_as(ctypes.c_void_p))
    assert count == rows * columns // 16
    seen = set()
    for _, row, chunk, source, first, second in out[:count].tolist():
        seen.add((row, chunk))
        assert source == swizzled(rows, row, chunk * 16)
        assert (first, second) == tuple(swizzled(rows, row, chunk * 32 + x) for x in (0, 16))
    assert len(seen) == count and max(chunk for _, chunk in seen) == columns // 16 - 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_widening_eight_neighbours_meet_no_bank_conflict(library, shape):
    rows, columns, threads = shape
    out = np.zeros((rows * columns, 6), np.int32)
    name = "places_" + "_".join(map(str, shape))
    count = getattr(library, name)(out.ctypes.data_as(ctypes.c_void_p))
    turns: dict[tuple[int, int], list[list[int]]] = {}
    taken = [0] * threads
    for thread, _, _, *places in out[:count].tolist():
        turns.setdefault((thread // 8, taken[thread]), []).append(places)
        taken[thread] += 1
    for turn in turns.values():
        for places in zip(*turn, strict=True):
            assert len({place % 128 for place in places}) == len(places)


@pytest.mark.parametrize("dtype", fp8.DTYPES)
@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16])
def test_widening_loses_nothing(dtype, wide):
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = numbers[numbers.isfinite()]
    assert torch.equal(finite.to(wide).float(), finite)


@pytest.mark.parametrize("kv_dtype", fp8.DTYPES)
@pytest.mark.parametrize("per_head", [False, True])
def test_reference_8_bit_keys_stand_for_scaled_numbers(kv_dtype, per_head):
    make = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 4, 32, generator=make).half()
    k, v = (torch.randn(2, 7, 2, 32, generator=make).to(kv_dtype) for _ in "kv")
    shape = (2, 2) if per_head else (1,)
    scales = {f"descale_{x}": torch.rand(shape, generator=make) + 0.5 for x in "kv"}
    out, aux = attention(q, k, v, **scales, mask="causal")
    spread = [x.reshape(-1, 1, x.shape[-1], 1).double() for x in scales.values()]
    wide = (x.double() * factor for x, factor in zip((k, v), spread, strict=True))
    wanted, wanted_aux = attention(q.double(), *wide, mask="causal")
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(aux.lse.double(), wanted_aux.lse, rtol=1e-5, atol=1e-5)
