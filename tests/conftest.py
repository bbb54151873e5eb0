"""Which tests are collected."""

from __future__ import annotations

from pathlib import Path

import pytest

CPU_TESTS = Path(__file__).parent / "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulate", action="store_true",
                     help="GPU tests run on the host: kernels' sources, compiled by g++")  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` leaves out the CPU tests before they import what a GPU machine need not have."""
    if config.getoption("markexpr") == "gpu" and collection_path == CPU_TESTS:
        return True
    return None
