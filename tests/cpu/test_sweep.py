"""A sample of all kernels that can be asked for compiles: what spills where many features meet."""

from __future__ import annotations

import random

import pytest

from attngen import features, resolve
from attngen.plan import plans
from tools import sweep


def test_sample_is_of_legal_problems_and_the_same_each_time() -> None:
    problems = sweep.sample(200, seed=0)
    assert problems == sweep.sample(200, seed=0) != sweep.sample(200, seed=1)
    assert len(set(problems)) == 200
    assert {problem.direction for problem in problems} == {"fwd", "bwd"}
    assert {problem.kv_fetch for problem in problems} == {"tma", "page_tma", "gather"}
    assert any(problem.decode for problem in problems)
    assert len({problem.head_dim_qk for problem in problems}) > 20


def test_every_legal_problem_has_plans() -> None:
    for problem in sweep.sample(600, seed=2):
        assert plans(problem, "sm_90a")


def test_drawn_spec_is_legal_as_it_is() -> None:
    choose = random.Random(3)
    for _ in range(50):
        assert not resolve.find_violations(sweep.draw(choose), features.scan())


def test_check_names_what_may_not_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = sweep.sample(1, seed=0)
    monkeypatch.setattr(sweep, "MOST_BYTES", 100)
    found = sweep.check(problem)
    assert found and all("bytes in a bundle" in line for line in found)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sample_compiles_into_kernels_that_may_ship() -> None:
    assert list(sweep.failures(sweep.sample(24, seed=0))) == []
