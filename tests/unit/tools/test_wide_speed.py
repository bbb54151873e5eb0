"""tools/wide_speed.py: its cases, and how FlexAttention comes by blocks that fit."""

from __future__ import annotations

import pytest

from attngen.bench.workloads import KI
from tools import wide_speed


def test_cases_are_of_heads_above_256_both_ways_and_the_first_dims_of_both_lengths():
    for direction in wide_speed.DIMS:
        found = wide_speed.cases(direction)
        assert all(each.head_dim > 256 for each in found)
        assert {each.length for each in found if each.head_dim_v == each.head_dim == 512} == {
            4 * KI,
            16 * KI,
        }
        assert sum(each.causal for each in found) * 2 == len(found)


def test_blocks_that_do_not_fit_are_tried_once():
    key = ("fwd", 512)
    tried, left = [], {key: wide_speed.BLOCKS}

    def make(options):
        tried.append(options)
        if options != wide_speed.BLOCKS[1]:
            raise ValueError("out of resource")
        return lambda: ()

    for _ in range(2):
        assert wide_speed._first_that_runs(left, key, make)() == ()
    assert tried == [wide_speed.BLOCKS[0], *[wide_speed.BLOCKS[1]] * 2]


def test_what_the_smallest_blocks_raise_is_the_reason():
    def make(options):
        raise ValueError("none fits" if options == wide_speed.BLOCKS[-1] else "too large")

    with pytest.raises(ValueError, match="none fits"):
        wide_speed._first_that_runs({("bwd", 512): wide_speed.BLOCKS}, ("bwd", 512), make)
