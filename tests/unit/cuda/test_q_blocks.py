"""Blocks of queries that a tile of keys visits: none is missed, full ones are full, and both
directions agree on who visits whom."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

UNBOUNDED = 1 << 30
MASK_LISTS = (
    *((), ("causal",), ("window",), ("causal", "window")),
    *(("chunked",), ("causal", "chunked"), ("prefix",)),
)
SIDES = (UNBOUNDED, 0, 1, 2, 5)
BLOCKS = (2, 3, 4)
TILE_KEYS = (1, 2, 3, 4)


def windows(masks) -> list[tuple[int, int]]:
    if "window" in masks:
        return [*itertools.product(SIDES, SIDES)]
    if "chunked" in masks or "prefix" in masks:  # whose number is what the left side is
        return [(side, UNBOUNDED) for side in SIDES]
    return [(UNBOUNDED, UNBOUNDED)]


def tiles_of(length: int, size: int) -> np.ndarray:
    """First and last position of every tile, [tiles, 2]."""
    first = np.arange(0, length, size)
    return np.stack([first, np.minimum(first + size, length) - 1], axis=1)


def pairs(seen: np.ndarray, keys: int, block: int, of_padding: bool) -> np.ndarray:
    """[tiles, blocks, keys, block]: what each key of a tile is seen by, padding as given."""
    kv_len, q_len = seen.T.shape
    padding = ((0, -kv_len % keys), (0, -q_len % block))
    padded = np.pad(seen.T, padding, constant_values=of_padding)
    shape = (padded.shape[0] // keys, keys, padded.shape[1] // block, block)
    return padded.reshape(shape).swapaxes(1, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("corner", (0, 1), ids=("top_left", "bottom_right"))
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_query_block_ranges_small_lengths_visit_what_sees_them(
    masks, corner, mask_library, defined
) -> None:
    library = mask_library(masks)
    for q_len, kv_len, window in itertools.product(range(10), range(1, 10), windows(masks)):
        sequence = (q_len, kv_len, corner)
        seen = defined(masks, sequence, window)
        for keys, block in itertools.product(TILE_KEYS, BLOCKS):
            at = f"{sequence=} {window=} {keys=} {block=}"
            found = library.query_block_ranges(sequence, window, tiles_of(kv_len, keys), block)
            begin, full_begin, full_end, end = found.T
            assert ((begin <= full_begin) & (full_begin <= full_end) & (full_end <= end)).all(), at
            number = np.arange(-(-q_len // block))
            visited = (number >= begin[:, None]) & (number < end[:, None])
            full = (number >= full_begin[:, None]) & (number < full_end[:, None])
            some = pairs(seen, keys, block, of_padding=False).any((2, 3))
            every = pairs(seen, keys, block, of_padding=True).all((2, 3))
            assert (visited == some).all(), f"{at}: {found.tolist()}"
            assert (end <= len(number))[begin < end].all(), at
            assert not (full & ~every).any(), f"{at}: a masked pair in a full block"


@pytest.mark.parametrize("corner", (0, 1), ids=("top_left", "bottom_right"))
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_both_directions_agree_on_the_pairs_of_blocks_that_are_visited(
    masks, corner, mask_library
) -> None:
    """The deterministic backward counts, for a block of queries, the tiles of keys before one's
    own by the first that the block visits: every tile from there to the last must visit it."""
    library = mask_library(masks)
    for q_len, kv_len, window in itertools.product(range(1, 10), range(1, 10), windows(masks)):
        sequence = (q_len, kv_len, corner)
        for rows, keys in itertools.product(BLOCKS, BLOCKS):
            by_rows = library.block_ranges(sequence, window, tiles_of(q_len, rows), keys)
            by_keys = library.query_block_ranges(sequence, window, tiles_of(kv_len, keys), rows)
            m, n = np.arange(len(by_rows)), np.arange(len(by_keys))
            visits = (n >= by_rows[:, 0, None]) & (n < by_rows[:, 3, None])
            visited = (m[:, None] >= by_keys[:, 0]) & (m[:, None] < by_keys[:, 3])
            assert (visits == visited).all(), f"{sequence=} {window=} {rows=} {keys=}"


@pytest.mark.parametrize("corner", (0, 1), ids=("top_left", "bottom_right"))
@pytest.mark.parametrize("masks", MASK_LISTS, ids=lambda masks: "+".join(masks) or "none")
def test_block_turns_say_which_blocks_have_tiles_before_and_after(
    masks, corner, mask_library
) -> None:
    """A tile of keys knows the others that visit a block of queries, too."""
    library = mask_library(masks)
    for q_len, kv_len, window in itertools.product(range(1, 12), range(1, 10), windows(masks)):
        sequence, keys = (q_len, kv_len, corner), 3
        tiles = tiles_of(kv_len, keys)
        for rows in BLOCKS:
            begin, *_, end = library.query_block_ranges(sequence, window, tiles, rows).T
            turns = library.block_turns(sequence, window, tiles, rows)
            summed_begin, last_begin, first_visits = turns.T
            number = np.arange(-(-q_len // rows))
            visited = (number >= begin[:, None]) & (number < end[:, None])
            after = np.cumsum(visited, axis=0) - visited  # the last tile is the first
            before = visited.sum(0) - after - visited
            at = f"{sequence=} {window=} {rows=}"
            assert (((number >= summed_begin[:, None]) == (before > 0)) | ~visited).all(), at
            assert (((number >= last_begin[:, None]) == (after == 0)) | ~visited).all(), at
            # What consumers prepare is what the kernel before leaves them, by one tile alone.
            ahead = (number >= begin[:, None]) & (number < (begin + first_visits)[:, None])
            left = library.first_visited(sequence, window, number, rows)[:, 0]
            assert (ahead.sum(0) == left).all() and not (ahead & (before > 0)).any(), at
            assert (ahead.sum(1) == np.minimum((visited & (before == 0)).sum(1), 2)).all(), at
