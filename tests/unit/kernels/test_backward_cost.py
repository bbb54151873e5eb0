"""Cost of a backward: where tiles of query heads are faster than those of the keys they share."""

from __future__ import annotations

import itertools

import pytest

from attngen.kernels.wgmma.backward.cost import is_faster

SMS = 132
SIZES = (1, 2, 3, 5, 8, 16, 31, 64, 200)


def faster(sequences, length, heads_q, heads_kv, causal, rows):
    """`is_faster` of sequences of as many keys as queries, in blocks of so many rows."""
    tiles, blocks = -(-length // 128), -(-length // rows)
    return is_faster(tiles, blocks, heads_kv * sequences, heads_q // heads_kv, causal, SMS)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(
    ("shape", "full", "causal"),
    [
        ((1, 512, 8, 1), True, True),
        ((1, 4096, 8, 1), True, True),
        ((1, 8192, 8, 1), True, True),
        ((1, 4096, 8, 4), False, True),
        ((1, 1024, 64, 8), True, True),
        ((1, 2048, 64, 8), False, True),
        ((1, 4096, 64, 8), False, False),
        ((2, 8192, 64, 8), False, False),
        ((1, 65536, 64, 8), False, False),
        ((1, 128, 2, 1), False, False),
        ((64, 512, 32, 4), False, False),
    ],
    ids=str,
)
def test_heads_apart_are_faster_where_a_call_has_few_tiles(shape, full, causal, rows):
    assert faster(*shape, False, rows) == full
    assert faster(*shape, True, rows) == causal


@pytest.mark.parametrize("causal", [False, True])
def test_heads_one_a_group_are_never_faster_apart(causal):
    for tiles, blocks, key_heads in itertools.product(SIZES, SIZES, SIZES):
        assert not is_faster(tiles, blocks, key_heads, 1, causal, SMS)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_apart_are_never_faster_where_tiles_keep_all_multiprocessors_busy(causal):
    """Whole rounds of equal tiles; of causal ones so many that all take as long as the longest."""
    for rounds, blocks, group in itertools.product((2, 3, 10), SIZES, (2, 3, 8, 64)):
        assert not is_faster(rounds, blocks, SMS, group, causal, SMS)
        assert not is_faster(SMS, blocks, rounds, group, causal, SMS)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_apart_that_are_faster_remain_so_with_more_queries(causal):
    for tiles, key_heads, group in itertools.product(SIZES, (1, 2, 8, 40), (2, 4, 8)):
        found = [is_faster(tiles, blocks, key_heads, group, causal, SMS) for blocks in range(1, 99)]
        assert found == sorted(found)


def test_heads_apart_that_are_faster_remain_so_with_fewer_tiles_or_more_multiprocessors():
    """Under a causal mask, where no rounds count."""
    for fixed, blocks, group in itertools.product(SIZES, SIZES, (2, 4, 8)):
        numbers = range(1, 300)
        of_tiles = [is_faster(n, blocks, fixed, group, True, SMS) for n in numbers]
        of_heads = [is_faster(fixed, blocks, n, group, True, SMS) for n in numbers]
        of_sms = [is_faster(8, blocks, fixed, group, True, n) for n in numbers]
        assert of_tiles == of_heads == sorted(of_tiles, reverse=True)
        assert of_sms == sorted(of_sms)
