"""No subject is missing from `make test`: it lacks parts of sweeps, and tests marked slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.support.paths import ROOT
from tests.support.sampling import COLLECTED, function_of, most_quickly, quickly

# Several processes that train, each with torch and a group: nothing of it is quick.
ALL_SLOW = {"tests/unit/frontends/fp8/test_ranks.py", "tests/unit/tools/test_context_pool.py"}


def files_of(items: Iterable[pytest.Item]) -> set[str]:
    return {item.path.relative_to(ROOT).as_posix() for item in items}


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Tests that this run could have, whatever it leaves out; all of them with `make test`."""
    return request.config.stash[COLLECTED]


def test_a_set_of_parameters_is_kept_of_each_test_but_slow_ones(collected) -> None:
    wanted = {function_of(item) for item in collected if not item.get_closest_marker("slow")}
    assert {function_of(item) for item in quickly(collected)} == wanted


def test_each_file_keeps_a_test(collected) -> None:
    assert files_of(collected) - files_of(quickly(collected)) <= ALL_SLOW


def test_sampled_tests_are_sweeps(collected) -> None:
    """A mark that leaves nothing out, or says a number of no sets, is a mistake."""
    marked = [item for item in collected if item.get_closest_marker("sampled")]
    counts = Counter(map(function_of, marked))
    wrong = {function_of(x) for x in marked if not 1 <= most_quickly(x) < counts[function_of(x)]}
    assert wrong == set()
