"""Blocks of keys that a tile visits: none is missed, none is needless, full ones are full."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.fragments import features

MASK_LISTS = (
    *((), ("causal",), ("window",), ("causal", "window")),
    *(("chunked",), ("causal", "chunked"), ("prefix",)),
)
STEADY_LISTS = [
    masks for masks in MASK_LISTS[1:] if all(features.scan()["mask"][name].steady for name in masks)
]
UNBOUNDED = 1 << 30
LONGEST = UNBOUNDED - 1
SIDES = (UNBOUNDED, 0, 1, 2, 5)
BLOCKS = (2, 3, 4)
TILE_ROWS = (1, 2, 3, 4)


def windows(masks) -> list[tuple[int, int]]:
    if "window" in masks:
        return [*itertools.product(SIDES, SIDES)]
    if "chunked" in masks or "prefix" in masks:  # whose number is what the left side is
        return [(side, UNBOUNDED) for side in SIDES]
    return [(UNBOUNDED, UNBOUNDED)]


def tiles_of(q_len: int, rows: int) -> np.ndarray:
    """First and last row of every tile, [tiles, 2]."""
    first = np.arange(0, q_len, rows)
    return np.stack([first, np.minimum(first + rows, q_len) - 1], axis=1)


def reduce_blocks(seen: np.ndarray, rows: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether any, and whether every, element of each tile's blocks is seen: bool [tiles, blocks].

    Rows past the last do not count; a block that reaches past the last key is never full.
    """
    q_len, kv_len = seen.shape
    pad_rows, pad_keys = -q_len % rows, -kv_len % block
    shape = ((q_len + pad_rows) // rows, rows, (kv_len + pad_keys) // block, block)
    some = np.pad(seen, ((0, pad_rows), (0, pad_keys)))
    every = np.pad(seen, ((0, pad_rows), (0, 0)), constant_values=True)
    every = np.pad(every, ((0, 0), (0, pad_keys)))
    return some.reshape(shape).any((1, 3)), every.reshape(shape).all((1, 3))


def check_blocks(found: np.ndarray, some: np.ndarray, every: np.ndarray) -> None:
    """Check the promises of `BlockRange` for all tiles of a sequence at once."""
    begin, full_begin, full_end, end = found.T
    assert ((begin <= full_begin) & (full_begin <= full_end) & (full_end <= end)).all()
    number = np.arange(some.shape[1])
    visited = (number >= begin[:, None]) & (number < end[:, None])
    full = (number >= full_begin[:, None]) & (number < full_end[:, None])
    assert not (some & ~visited).any(), "a block with a visible key is not visited"
    assert not (full & ~every).any(), "a block called full holds a key that some row must not see"
    assert (full == every).all(), "a block that needs no mask is masked"
    for tile, (first, last) in enumerate(zip(begin, end, strict=True)):
        if some[tile].any():
            assert some[tile, first] and last <= len(number) and some[tile, last - 1]
        else:
            assert first == last, "a tile that sees no key visits blocks"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("corner", (0, 1), ids=("top_left", "bottom_right"))
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_block_ranges_small_lengths_visit_what_is_visible(
    masks, corner, mask_library, defined
) -> None:
    library = mask_library(masks)
    lengths = itertools.product(range(1, 10), range(10), windows(masks))
    for q_len, kv_len, window in lengths:
        seen = defined(masks, (q_len, kv_len, corner), window)
        for rows, block in itertools.product(TILE_ROWS, BLOCKS):
            tiles = tiles_of(q_len, rows)
            found = library.block_ranges((q_len, kv_len, corner), window, tiles, block)
            try:
                check_blocks(found, *reduce_blocks(seen, rows, block))
            except AssertionError as error:
                at = f"{q_len=} {kv_len=} {corner=} {window=} {rows=} {block=} {found.tolist()}"
                raise AssertionError(at) from error


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_block_ranges_any_length_visit_what_is_visible(masks, mask_library, data) -> None:
    lengths = st.integers(1, LONGEST) | st.integers(1, 1000)
    side = st.just(UNBOUNDED) | st.integers(0, LONGEST) | st.integers(0, 1000)
    q_len, kv_len, left, right = (data.draw(s) for s in (lengths, lengths, side, side))
    corner, block = data.draw(st.integers(0, 1)), data.draw(st.sampled_from((80, 128)))
    rows = data.draw(st.sampled_from((64, 128, 192)))
    first = data.draw(st.integers(0, (q_len - 1) // rows)) * rows
    last = min(first + rows, q_len) - 1
    delta = kv_len - q_len if corner else 0

    def keys(i: int) -> tuple[int, int]:
        """First and last key that row i sees, by the definition; first > last: none."""
        lo, hi = 0, kv_len - 1
        if "causal" in masks:
            hi = min(hi, i + delta)
        if "window" in masks:
            lo = max(lo, i + delta - left) if left != UNBOUNDED else lo
            hi = min(hi, i + delta + right) if right != UNBOUNDED else hi
        if "chunked" in masks:
            first = (i + delta) // max(left, 1) * max(left, 1)
            lo, hi = max(lo, first), min(hi, first + max(left, 1) - 1)
        if "prefix" in masks:
            hi = min(hi, max(left - 1, i + delta))
        return lo, hi

    window, sequence = (left, right), (q_len, kv_len, corner)
    found = mask_library(masks).block_ranges(sequence, window, [(first, last)], block)[0]
    begin, full_begin, full_end, end = map(int, found)
    assert begin <= full_begin <= full_end <= end
    all_rows = [keys(i) for i in range(first, last + 1)]
    seen = [(lo, hi) for lo, hi in all_rows if lo <= hi]
    if not seen:
        assert begin == end
        return
    assert begin == min(lo for lo, _ in seen) // block
    assert end == max(hi for _, hi in seen) // block + 1
    if full_begin < full_end:
        assert all(lo <= full_begin * block for lo, _ in all_rows)
        assert all(hi >= full_end * block - 1 for _, hi in all_rows)


@pytest.mark.parametrize("warpgroups", [2, 3, 4])
@pytest.mark.parametrize("masks", STEADY_LISTS, ids=lambda masks: "+".join(masks))
def test_block_ranges_of_a_part_of_a_tile_lack_few_of_its_blocks(
    masks, warpgroups, mask_library
) -> None:
    """A warpgroup under masks that say they are steady visits blocks of its tile, and passes over
    no more of them at either end than there are warpgroups."""
    library, own = mask_library(masks), 2
    for q_len, kv_len, corner in itertools.product((1, 2, 5, 6, 7, 13), range(1, 14), (0, 1)):
        sequence = (q_len, kv_len, corner)
        for window in windows(masks):
            tiles = library.block_ranges(sequence, window, tiles_of(q_len, warpgroups * own), own)
            parts = library.block_ranges(sequence, window, tiles_of(q_len, own), own)
            for number, (begin, _, _, end) in enumerate(parts.tolist()):
                tile_begin, tile_end = tiles[number // warpgroups, [0, 3]].tolist()
                tile_end = max(tile_end, tile_begin + 1)
                if begin == end:  # then the first that the tile visits, in which all is hidden
                    begin, end = tile_end - 1, tile_end
                assert tile_begin <= begin < end <= tile_end
                assert max(tile_end - end, begin - tile_begin) <= warpgroups


def test_block_ranges_long_causal_sequence_are_mostly_full(mask_library) -> None:
    """Blocks below the diagonal take the fast path; a range with no full block would be legal."""
    library = mask_library(("causal",))
    found = library.block_ranges((4096, 4096, 0), (UNBOUNDED, UNBOUNDED), [(3968, 4095)], 128)
    assert found.tolist() == [[0, 0, 31, 32]]
