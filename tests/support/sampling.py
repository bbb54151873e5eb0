"""A part of the tests, the same each time: of many sets of parameters a few, evenly spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import pytest

MOST_QUICKLY = 3  # sets of parameters of a test that has no mark
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # by a run, before options leave some out


def function_of(item: pytest.Item) -> str:
    """A test's name without its parameters: `tests/unit/x.py::test_y`."""
    return item.nodeid.partition("[")[0]


def quickly(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Leave out what `--quick` does without: slow tests, and most sets of parameters of sweeps."""
    return sample([item for item in items if not item.get_closest_marker("slow")], most_quickly)


def most_quickly(item: pytest.Item) -> int:
    """How many sets of parameters `--quick` takes of a test."""
    mark = item.get_closest_marker("sampled")
    most: int = MOST_QUICKLY if mark is None else mark.args[0]
    return most


def sample(items: Iterable[pytest.Item], limit: Callable[[pytest.Item], int]) -> list[pytest.Item]:
    """Keep at most `limit(item)` sets of parameters of each test, evenly spread, in their order."""
    kept = []
    for _, group in groupby(items, function_of):
        sets = list(group)
        count = min(limit(sets[0]), len(sets))
        kept += [sets[(2 * n + 1) * len(sets) // (2 * count)] for n in range(count)]
    return kept
