"""Packed sequences by the kernels' own code: where they lie, whatever integers say so; their tiles,
and the rows between them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen import AttentionSpec
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.kernels.plan import plans
from attngen.runtime.run_time import Extent, blocks_of
from attngen.spec.resolve import resolve

ROWS, LONGEST = 4, 1 << 30
LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1
HARNESS = """
#include "attngen/context.cuh"
#include "attngen/scheduler/packed_tiles.cuh"
#include "attngen/scheduler/sequence_order.cuh"
namespace attngen {
%s
}  // namespace attngen
using namespace attngen;
extern "C" void spans(const int* seqlens, const int* offsets, int n, int rows, int longest,
                      int* out) {
  const PackedSequence sequence = {rows, seqlens, offsets, longest};
  for (int b = 0; b < n; ++b) {
    const SequenceIndex found = sequence.batch_index(b);
    const int all[] = {sequence.first_token(b), sequence.length(b), sequence.lies(b)};
    for (int i = 0; i < 3; ++i) out[3 * b + i] = all[i];
    if (found.start != all[0] || found.length != all[1]) out[3 * b] = -7;
  }
}
extern "C" void gaps(const int* seqlens, const int* offsets, int n, int rows, int* out) {
  const PackedSequence sequence = {rows, seqlens, offsets, kLongest};
  out[0] = sequence.may_have_gaps(n);
  for (int b = -1; b < n; ++b) {
    const Range found = sequence.gap(b, n);
    out[2 * b + 3] = found.lo, out[2 * b + 4] = found.hi;
  }
}
extern "C" void firsts(const int* seqlens, const int* offsets, int n, int rows, int each,
                       int* out) {
  const PackedSequence sequence = {rows, seqlens, offsets, kLongest};
  const PackedTiles<4, PackedSequence> tiles = {sequence, n, each};
  for (int b = 0; b < n; ++b) out[b] = tiles.first(b);
}
extern "C" void owners(const int* seqlens, const int* offsets, int n, int rows, int each, int count,
                       int* out) {
  const PackedSequence sequence = {rows, seqlens, offsets, kLongest};
  const PackedTiles<4, PackedSequence> tiles = {sequence, n, each};
  for (int tile = 0; tile < count; ++tile) out[tile] = tiles.sequence_of(tile);
}
extern "C" int used(int length, int room) { return length_within(length, room); }
extern "C" int sum(int some, int others) { return add_tiles(some, others); }
extern "C" int product(int tiles, int heads) { return tiles_of_heads(tiles, heads); }
"""
Spans = list[tuple[int, int]]


@pytest.fixture(scope="module")
def compiled(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    fragment = emit_fragment(files.templates_dir(), features.scan()["sequence"]["packed"])
    return ctypes.CDLL(str(compile_cpp(HARNESS % fragment)))


def pointer(numbers: Sequence[int]) -> tuple[np.ndarray, ctypes.c_void_p]:
    """An int32 array and its address; numbers beyond 32 bits wrap around."""
    array = np.array(numbers, dtype=np.int64).astype(np.int32)
    return array, array.ctypes.data_as(ctypes.c_void_p)


def ask(
    function, count: int, ends: Sequence[int], starts: Sequence[int], *numbers: int
) -> list[int]:
    """Numbers that a function of the harness fills in, for lengths by their ends, and places: where
    these are the same, the same array."""
    own = pointer(ends)
    places = own if [*ends] == [*starts] else pointer(starts)
    out, to = pointer([-9] * count)
    function(own[1], places[1], len(ends) - 1, *numbers, to)
    return [int(x) for x in out]


def spans_of(compiled, ends, starts, rows: int, longest: int = LONGEST) -> tuple[Spans, list[bool]]:
    """Start and length of each sequence, and whether it lies in the tensor."""
    n = len(ends) - 1
    found = ask(compiled.spans, 3 * n, ends, starts, rows, longest)
    return [*zip(found[::3], found[1::3], strict=True)], [bool(x) for x in found[2::3]]


def in_order(spans: Spans, lies: Sequence[bool]) -> list[bool]:
    """Which sequences that lie in the tensor follow those before them, and precede the others."""

    def follows(a: int, b: int) -> bool:
        return sum(spans[a]) <= spans[b][0]

    n = len(spans)
    return [
        lies[b]
        and all(follows(a, b) for a in range(b) if lies[a])
        and all(follows(b, c) for c in range(b + 1, n) if lies[c])
        for b in range(n)
    ]


def every_small_call() -> Iterator[tuple[list[int], list[int], int]]:
    """Ends, starts and rows: all of two sequences in few rows, and with garbage."""
    numbers = (LOWEST, -1, 0, 1, 2, 3, 5, HIGHEST)
    for ends in itertools.product(numbers, repeat=3):
        yield [*ends], [*ends], 3
        for starts in itertools.product((LOWEST, -1, 0, 1, 2, 3, 4, HIGHEST), repeat=2):
            yield [*ends], [*starts, 3], 3


def test_every_span_is_what_was_said_inside_the_tensor_or_nothing(compiled):
    for ends, starts, rows in every_small_call():
        spans, lies = spans_of(compiled, ends, starts, rows)
        for b, (start, length) in enumerate(spans):
            said = starts[b], (ends[b + 1] - ends[b] + LONGEST * 2) % (1 << 32) - LONGEST * 2
            fits = 0 <= said[0] and 0 <= said[1] and sum(said) <= rows
            assert lies[b] == fits
            assert length == (said[1] if fits else 0)
            assert start == (said[0] if 0 <= said[0] <= rows else 0)


def test_no_sequence_is_longer_than_a_mask_reaches(compiled):
    for longest in range(5):
        spans, lies = spans_of(compiled, [0, 3, 5], [0, 3, 5], 5, longest)
        assert lies == [longest >= 3, longest >= 2]
        assert spans == [(0, 3 * lies[0]), (3, 2 * lies[1])]


def test_gaps_are_inside_the_tensor_and_beside_sequences_in_order(compiled):
    for ends, starts, rows in every_small_call():
        found = ask(compiled.gaps, 7, ends, starts, rows)
        spans, lies = spans_of(compiled, ends, starts, rows)
        rows_of = [{*range(start, start + length)} for start, length in spans]
        members = set().union(*(rows_of[b] for b in range(2) if in_order(spans, lies)[b]))
        filled = set()
        for lo, hi in zip(found[1::2], found[2::2], strict=True):
            assert hi <= lo or (0 <= lo and hi <= rows)
            filled |= {*range(lo, hi)}
        assert not filled & members
        if all(in_order(spans, lies)):
            assert filled == {*range(rows)} - members
            assert found[0] or not filled
            assert not found[0] or filled or ends != starts


def check_tiles(compiled, ends, starts, rows: int, each: int) -> None:
    """Asserts that tiles of sequences lie in the workspace, those of sequences in order are their
    own, and these are found by them."""
    n = len(ends) - 1
    spans, lies = spans_of(compiled, ends, starts, rows)
    count = blocks_of(Extent(1, rows * each, 1, 64, 0, 0, 0), ROWS, "packed", n)
    firsts = ask(compiled.firsts, n, ends, starts, rows, each)
    owners = ask(compiled.owners, count, ends, starts, rows, each, count)
    assert all(0 <= owner < n for owner in owners)
    tiles = [
        {*range(f, f + -(-length * each // ROWS))}
        for f, (_, length) in zip(firsts, spans, strict=True)
    ]
    assert all(0 <= tile < count for mine in tiles for tile in mine)
    for b, ok in enumerate(in_order(spans, lies)):
        if ok:
            assert all(owners[tile] == b for tile in tiles[b])
            assert not any(tiles[b] & tiles[other] for other in range(n) if other != b)
            assert owners[firsts[b]] == b  # it sees to the rows behind the sequence


def test_tiles_of_sequences_in_order_are_their_own_beside_any_garbage(compiled):
    for ends, starts, rows in every_small_call():
        check_tiles(compiled, ends, starts, rows, 1)


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_tiles_of_longer_sequences_are_their_own(compiled, data):
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    gaps = data.draw(
        st.lists(st.integers(0, 9), min_size=len(lengths) + 1, max_size=len(lengths) + 1)
    )
    ends = [0, *itertools.accumulate(lengths)]
    starts = [*(end + sum(gaps[: b + 1]) for b, end in enumerate(ends[:-1])), ends[-1] + sum(gaps)]
    garbage = st.one_of(st.integers(-3, starts[-1] + 9), st.integers(LOWEST, HIGHEST))
    for array in (ends, starts):
        for at in data.draw(st.lists(st.integers(0, len(lengths)), max_size=4)):
            array[at] = data.draw(garbage)
    check_tiles(compiled, ends, starts, sum(lengths) + sum(gaps), data.draw(st.integers(1, 9)))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 130), st.integers(0, 9)
)
def test_tiles_hold_every_row_of_every_sequence_once(compiled, lengths, group, start):
    """Also where lengths are not counted from 0. The host makes as many tiles as there may be."""
    ends = [start, *(start + x for x in itertools.accumulate(lengths))]
    check_tiles(compiled, ends, ends, ends[-1], group)
    spans, _ = spans_of(compiled, ends, ends, ends[-1])
    assert [length for _, length in spans] == lengths


def test_lengths_in_use_are_those_of_the_room(compiled):
    for length in (LOWEST, -1, 0, 1, 4, 5, 6, HIGHEST):
        assert compiled.used(length, 5) == min(max(length, 0), 5)


def test_counts_of_tiles_never_wrap_around(compiled):
    most = compiled.sum(HIGHEST, HIGHEST)
    assert most + 65535 <= HIGHEST  # every CTA adds one
    assert compiled.sum(5, 7) == 12 and compiled.sum(most, 1) == most
    assert compiled.product(1 << 29, 1 << 10) == most and compiled.product(3, 7) == 21


# The place of a CTA of the kernel before a backward: its block, or a return where it has none.
PLACE = """
#define ATTNGEN_DEVICE inline
#include "attngen/context.cuh"
struct { int x, y, z; } blockIdx, gridDim, threadIdx;
#include "attngen/scheduler/grid_place.cuh"
#include "attngen/scheduler/packed_tiles.cuh"
using namespace attngen;
struct Params {
  int q_len; const void* q_seqlens; const void* q_offsets; int q_longest; int sequences;
  int q_blocks; int heads_q; void* turns;
};
%s
static int marked;
static void allow_dependents() {}
static void run(const Params& p) {
%s
  (void)head, (void)first_token, (void)slot;
  marked = 1 + batch * 100 + block;
}
extern "C" int place_of(const int* seqlens, const int* offsets, int sequences, int tokens, int ctas,
                        int x, int heads, int y, int folded, int* turns) {
  marked = 0, blockIdx = {x, y, 0}, gridDim = {ctas, heads, 1};
  if (folded) blockIdx = {y * ctas + x, 0, 0}, gridDim = {heads * ctas, 1, 1};
  run({tokens, seqlens, offsets, kLongest, sequences, ctas, heads, turns});
  return marked - 1;
}
"""


def test_blocks_of_no_sequence_have_no_cta(compile_cpp):
    """Before the first sequence, between two, and behind the last. The first CTA has the last. A
    count of turns is zeroed for each, and all in the first axis of a grid do likewise."""
    spec = AttentionSpec(64, layout="thd", directions=("bwd",))
    (problem,) = resolve(spec, features.scan())
    sources = [render_problem(problem, each) for each in plans(problem, "sm_90a")]
    (source,) = (each for each in sources if each.kernel.entry.startswith("bwd_prepare"))
    rows = source.kernel.row_block
    struct = "struct PackedSequence {" + source.text.split("struct PackedSequence {")[1]
    body = source.text.split("using namespace attngen;")[1].split("  const int lane")[0]
    constant = f"constexpr int kTileM = {rows};\n"
    code = PLACE % (constant + struct.split("\n};\n")[0] + "\n};", body)
    place_of = ctypes.CDLL(str(compile_cpp(code))).place_of
    lens, starts, tokens = (1, 0, 2 * rows), (3 * rows + 5, 5 * rows, 5 * rows + 9), 9 * rows
    _, seqlens = pointer([0, *np.cumsum(lens)])
    _, offsets = pointer([*starts, tokens])
    ctas, heads = tokens // rows + 3, 3
    for folded in (0, 1):
        turns, to = pointer([-1] * ctas * heads)
        for y in range(heads):
            places = (seqlens, offsets, 3, tokens, ctas)
            found = [place_of(*places, x, heads, y, folded, to) for x in range(ctas)]
            assert [x for x in found if x >= 0] == [201, 200, 0] and set(found) == {-1, 0, 200, 201}
            assert (turns.reshape(heads, ctas)[heads - 1 - y :] == 0).all()
            assert (turns.reshape(heads, ctas)[: heads - 1 - y] == -1).all()
