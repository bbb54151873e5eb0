"""Masks: the C++ that kernels run, against the definition, exhaustively where it is small."""

from __future__ import annotations

import itertools
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.fragments import features

MASK_LISTS = (
    *((), ("causal",), ("window",), ("causal", "window"), ("window", "causal")),
    *(("chunked",), ("causal", "chunked"), ("prefix",)),
)
UNBOUNDED = 1 << 30
LONGEST = UNBOUNDED - 1
EXCERPT = ("-Wno-unknown-pragmas", "-Wno-unused-parameter")
SIDES = (UNBOUNDED, 0, 1, 2, 5)
SEQUENCES = tuple(itertools.product(range(10), range(10), (0, 1)))

# Calls a mask list where sums of positions are largest; any signed overflow traps.
EXTREMES = """
int main() {
  const int longest = (1 << 30) - 1, unbounded = 1 << 30;
  const int lengths[] = {1, 2, longest - 1, longest};
  const int sides[] = {0, 1, longest, unbounded};
  for (int q : lengths) for (int kv : lengths) for (int corner = 0; corner < 2; ++corner)
  for (int left : sides) for (int right : sides) {
    const int sequence[] = {q, kv, corner};
    const int i[] = {0, q - 1}, j[] = {0, kv - 1};
    const int tiles[] = {0, 0, 0, q - 1, q - 1, q - 1};
    int out[12];
    row_ranges(sequence, left, right, 2, i, out);
    col_ranges(sequence, left, right, 2, j, out);
    const int key_tiles[] = {0, 0, 0, kv - 1, kv - 1, kv - 1};
    for (int block : {80, 128}) {
      block_ranges(sequence, left, right, 3, tiles, out, block, 0);
      block_ranges(sequence, left, right, 3, key_tiles, out, block, 1);
    }
  }
}
"""


def windows(masks: tuple[str, ...]) -> list[tuple[int, int]]:
    """Every window that makes a difference to the masks."""
    if "window" in masks:
        return [*itertools.product(SIDES, SIDES)]
    if "chunked" in masks or "prefix" in masks:  # whose number is what the left side is
        return [(side, UNBOUNDED) for side in SIDES]
    return [(UNBOUNDED, UNBOUNDED)]


def inside(ranges: np.ndarray, count: int) -> np.ndarray:
    """Membership of 0 .. count - 1 in each range, bool [ranges, count]."""
    positions = np.arange(count)
    return (positions >= ranges[:, :1]) & (positions < ranges[:, 1:])


def test_mask_fragments_all_of_them_are_compared_with_a_definition() -> None:
    assert {name for masks in MASK_LISTS for name in masks} == set(features.scan()["mask"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_row_range_small_lengths_is_the_definition(masks, mask_library, defined) -> None:
    library = mask_library(masks)
    for sequence, window in itertools.product(SEQUENCES, windows(masks)):
        q_len, kv_len, _ = sequence
        ranges = library.row_ranges(sequence, window, range(q_len))
        expected = defined(masks, sequence, window)
        assert np.array_equal(inside(ranges, kv_len), expected), (sequence, window)


@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_col_range_small_lengths_is_the_transposed_definition(masks, mask_library, defined) -> None:
    library = mask_library(masks)
    for sequence, window in itertools.product(SEQUENCES, windows(masks)):
        q_len, kv_len, _ = sequence
        ranges = library.col_ranges(sequence, window, range(kv_len))
        expected = defined(masks, sequence, window).T
        assert np.array_equal(inside(ranges, q_len), expected), (sequence, window)


@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_row_range_ends_never_decrease_even_past_the_last_row(masks, mask_library) -> None:
    library = mask_library(masks)
    for sequence, window in itertools.product(SEQUENCES, windows(masks)):
        ranges = library.row_ranges(sequence, window, range(sequence[0] + 4))
        assert (np.diff(ranges, axis=0) >= 0).all(), (sequence, window)


@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_row_range_stays_inside_the_keys(masks, mask_library) -> None:
    library = mask_library(masks)
    for sequence, window in itertools.product(SEQUENCES, windows(masks)):
        ranges = library.row_ranges(sequence, window, range(sequence[0]))
        assert (ranges[:, 0] >= 0).all() and (ranges[:, 1] <= sequence[1]).all()


@pytest.mark.parametrize("name", sorted(features.scan()["mask"]))
def test_mask_sides_without_declared_bounds_limit_nothing(name, mask_library) -> None:
    """Kernels mask only blocks on the sides that a header declares."""
    bounds = features.scan()["mask"][name].bounds
    library = mask_library((name,))
    limited = {"left": False, "right": False}
    for sequence, window in itertools.product(SEQUENCES, windows((name,))):
        ranges = library.row_ranges(sequence, window, range(sequence[0]))
        limited["left"] |= bool((ranges[:, 0] > 0).any())
        limited["right"] |= bool((ranges[:, 1] < sequence[1]).any())
    assert limited == {side: side in bounds for side in limited}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_ranges_any_length_hold_exactly_the_visible_keys(masks, mask_library, data) -> None:
    lengths = st.integers(1, LONGEST) | st.integers(1, 300)
    side = st.just(UNBOUNDED) | st.integers(0, LONGEST) | st.integers(0, 300)
    q_len, kv_len, left, right = (data.draw(s) for s in (lengths, lengths, side, side))
    corner = data.draw(st.integers(0, 1))
    i = data.draw(st.integers(0, q_len - 1))
    diagonal = i + (kv_len - q_len if corner else 0)
    near = [diagonal + step + shift for step in (-left, 0, right) for shift in (-1, 0, 1)]
    if "chunked" in masks:
        near += [diagonal // max(left, 1) * max(left, 1) + shift for shift in (-1, 0, 1)]
    candidates = [j for j in near if 0 <= j < kv_len]
    j = data.draw(st.sampled_from([0, kv_len - 1, *candidates]))

    seen = "causal" not in masks or j <= diagonal
    if "window" in masks:
        seen &= left == UNBOUNDED or j >= diagonal - left
        seen &= right == UNBOUNDED or j <= diagonal + right
    if "chunked" in masks:
        seen &= j // max(left, 1) == diagonal // max(left, 1)
    if "prefix" in masks:
        seen &= j < left or j <= diagonal
    library, sequence, window = mask_library(masks), (q_len, kv_len, corner), (left, right)
    (lo, hi), (first, last) = (
        library.row_ranges(sequence, window, [i])[0],
        library.col_ranges(sequence, window, [j])[0],
    )
    assert (lo <= j < hi) == seen
    assert (first <= i < last) == seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_ranges_longest_lengths_never_overflow(masks, mask_source, compile_cpp) -> None:
    traps = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
    program = compile_cpp(mask_source(masks) + EXTREMES, *EXCERPT, *traps, executable=True)
    assert subprocess.run([program]).returncode == 0
