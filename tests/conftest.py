"""Which tests are collected."""

from __future__ import annotations

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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` leaves out the unit tests before they import what a GPU machine need not have."""
    if config.getoption("markexpr").startswith("gpu") and collection_path == UNIT_TESTS:
        return True
    return None


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--each`."""
    most = config.getoption("each")
    if not most:
        return
    every: list[pytest.Item] = list(items)
    kept: dict[pytest.Item, None] = {}
    for _, group in groupby(every, lambda item: item.nodeid.partition("[")[0]):
        sets = list(group)
        count = min(most, len(sets))
        kept |= {sets[(2 * n + 1) * len(sets) // (2 * count)]: None for n in range(count)}
    items[:] = kept
    config.hook.pytest_deselected(items=[item for item in every if item not in kept])
