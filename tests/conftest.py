"""Which tests are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import pytest

UNIT_TESTS = Path(__file__).parent / "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        action="store_true",
        help="GPU tests run on the host: kernels' sources, compiled by g++",
    )
    parser.addoption(
        "--each",
        type=int,
        metavar="N",
        help="of each test at most N sets of parameters, evenly spread",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="no test marked slow; of one marked sampled(n) n sets of parameters, evenly spread",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` leaves out the unit tests before they import what a GPU machine need not have."""
    if config.getoption("markexpr").startswith("gpu") and collection_path == UNIT_TESTS:
        return True
    return None


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--quick` and `--each` do without."""
    kept = list(items)
    if config.getoption("quick"):
        kept = sample([item for item in kept if not item.get_closest_marker("slow")], most_quickly)
    if most := config.getoption("each"):
        kept = sample(kept, lambda item: most)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


def most_quickly(item: pytest.Item) -> int | None:
    """How many sets of parameters `--quick` takes of a test; None for all."""
    mark = item.get_closest_marker("sampled")
    return None if mark is None else mark.args[0]


def sample(
    items: Iterable[pytest.Item], limit: Callable[[pytest.Item], int | None]
) -> list[pytest.Item]:
    """Keep at most `limit(item)` sets of parameters of each test, evenly spread, in their order."""
    kept = []
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        sets = list(group)
        count = min(limit(sets[0]) or len(sets), len(sets))
        kept += [sets[(2 * n + 1) * len(sets) // (2 * count)] for n in range(count)]
    return kept
