"""Maps of blocks: the blocks that kernels find are those that some granule shows."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

BLOCKS = (48, 64, 112, 128, 192)
GRANULES = 150
SOURCE = """
#include "attngen/scheduler/block_map.cuh"
using namespace attngen;
"""
ENTRY = """
extern "C" int from_{n}(const u32* rows, int words, int count, int block) {{
  return BlockMap{{rows, words, count, words}}.from<{n}>(block);
}}
extern "C" int before_{n}(const u32* rows, int words, int count, int end) {{
  return BlockMap{{rows, words, count, words}}.before<{n}>(end);
}}
extern "C" int count_{n}(const u32* rows, int words, int count, int begin, int end) {{
  return BlockMap{{rows, words, count, words}}.count_of<{n}>(begin, end);
}}
"""


@pytest.fixture(scope="module")
def library(compile_cpp) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_cpp(SOURCE + "".join(ENTRY.format(n=n) for n in BLOCKS))))


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.6])
def test_blocks_are_those_of_the_granules_of_the_tiles_rows(library, size, share) -> None:
    draw, words, rows = random.Random(size), -(-GRANULES // 32), 2
    bits = [[draw.random() < share for _ in range(GRANULES)] for _ in range(rows)]
    packed = np.zeros((rows, words), np.uint32)
    for row, place in np.argwhere(bits):
        packed[row, place // 32] |= np.uint32(1 << place % 32)
    blocks = -(-GRANULES * 64 // size)
    seen = []
    for block in range(blocks):
        own = range(block * size // 64, min((block * size + size - 1) // 64 + 1, GRANULES))
        seen.append(any(bits[row][place] for row in range(rows) for place in own))
    given = ctypes.c_void_p(packed.ctypes.data), words, rows
    for block in range(blocks + 1):
        ahead = next((n for n in range(block, blocks) if seen[n]), 1 << 30)
        assert getattr(library, f"from_{size}")(*given, block) == ahead
        behind = next((n for n in reversed(range(block)) if seen[n]), -1)
        assert getattr(library, f"before_{size}")(*given, block) == behind
    counted = getattr(library, f"count_{size}")(*given, 3, blocks - 2)
    assert counted == sum(seen[3 : blocks - 2])
