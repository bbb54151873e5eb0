"""Places of new tokens, by the kernel's own code."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

SOURCE = """
#include "attngen/append/place.cuh"
using namespace attngen;
extern "C" void dense(const int* ends, int place, int room, int* out) {
  const Token token = dense_token(ends, place, room);
  out[0] = token.sequence, out[1] = token.row, out[2] = token.count, out[3] = token.there;
}
extern "C" int before(const int* lengths, const int* all, int sequence, int count) {
  return length_before(lengths, all, Token{sequence, 0, count, true});
}
extern "C" void slot(const int* table, const int* sizes, int sequence, int position, int* out) {
  const Slot found = slot_of(table, sizes[0], sizes[1], sizes[2], sizes[3], sequence, position);
  out[0] = static_cast<int>(found.page), out[1] = static_cast<int>(found.row), out[2] = found.there;
}
"""
ENDS = np.array([0, 3, 3, 7], np.int32)


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_cpp(SOURCE)))


def pointer(x: np.ndarray | None) -> ctypes.c_void_p | None:
    return None if x is None else x.ctypes.data_as(ctypes.c_void_p)


def numbers(function: Callable[..., None], count: int, *given: object) -> list[int]:
    out = np.zeros(count, np.int32)
    function(*given, pointer(out))
    return out.tolist()


def test_dense_tokens_count_their_sequence(library: ctypes.CDLL) -> None:
    room = 4
    for sequence, row in itertools.product(range(3), range(room)):
        place, count = sequence * room + row, int(ENDS[sequence + 1] - ENDS[sequence])
        found = numbers(library.dense, 4, pointer(ENDS), place, room)
        assert found == [sequence, row, count, row < count]
        assert numbers(library.dense, 4, None, place, room) == [sequence, row, room, 1]


def test_tokens_before_are_told_or_what_all_have_more(library: ctypes.CDLL) -> None:
    before = np.array([5, 0, 9], np.int32)
    new = np.diff(ENDS)
    every = np.concatenate([[0], np.cumsum(before + new)]).astype(np.int32)
    for sequence in range(3):
        count = int(new[sequence])
        assert library.before(pointer(before), None, sequence, count) == before[sequence]
        assert library.before(None, pointer(every), sequence, count) == before[sequence]


@pytest.mark.parametrize("size", [1, 3, 16])
def test_positions_lie_in_the_pages_of_a_table(library: ctypes.CDLL, size: int) -> None:
    table = np.array([[4, 0, 2, 77], [1, 9, -1, 77]], np.int32)
    sizes = np.array([4, 3, size, 5], np.int32)  # stride, columns, rows of a page, pages
    for sequence, position in itertools.product(range(2), range(-2, 3 * size + 2)):
        column, row = divmod(position, size)
        inside = 0 <= column < 3
        there = inside and 0 <= table[sequence, column] < 5
        found = numbers(library.slot, 3, pointer(table), pointer(sizes), sequence, position)
        assert found == ([table[sequence, column], row, there] if inside else [0, 0, 0])


def test_rows_are_pages_of_one_sequence(library: ctypes.CDLL) -> None:
    sizes = np.array([1, 1, 8, 2], np.int32)
    for sequence, position in itertools.product(range(3), range(10)):
        found = numbers(library.slot, 3, None, pointer(sizes), sequence, position)
        assert found == ([sequence, position, sequence < 2] if position < 8 else [0, 0, 0])
