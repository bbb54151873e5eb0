"""Which tests are collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.devices import turn_devices
from tests.support.sampling import COLLECTED, quickly, sample

turn_devices(os.environ)  # before a module of tests asks for one

UNIT_TESTS = Path(__file__).parent / "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        action="store_true",
        help="GPU tests run on the host: kernels' sources, compiled by g++",
    )
    parser.addoption(
        "--build-only",
        nargs="?",
        const="1/1",
        metavar="I/N",
        help="of GPU tests the kernels are built, or part I of N, and no test runs",
    )
    parser.addoption(
        "--built",
        action="store_true",
        help="kernels of GPU tests have been built: none is looked for before the first test",
    )
    parser.addoption(
        "--each",
        type=int,
        metavar="N",
        help="of each test at most N sets of parameters, evenly spread",
    )
    parser.addoption(
        "--shard",
        metavar="I/N",
        help="every N-th test alone, from the I-th on, counted from 1",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="no test marked slow; of each at most 3 sets of parameters, or n of one marked "
        "sampled(n), evenly spread",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` leaves out the unit tests before they import what a GPU machine need not have."""
    if config.getoption("markexpr").startswith("gpu") and collection_path == UNIT_TESTS:
        return True
    return None


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--quick`, `--each` and `--shard` do without."""
    config.stash[COLLECTED] = kept = list(items)
    if config.getoption("quick"):
        kept = quickly(kept)
    if most := config.getoption("each"):
        kept = sample(kept, lambda item: most)
    if shard := config.getoption("shard"):
        first, shards = map(int, shard.split("/"))
        kept = kept[first - 1 :: shards]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
