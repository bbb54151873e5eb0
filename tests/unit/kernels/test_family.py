"""Families: each is one folder, found by it, which alone knows the names of its kernels."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from attngen.errors import PlanError
from attngen.io.values import to_data
from attngen.kernels import family as registry
from attngen.kernels.base import KernelPlan
from attngen.kernels.family import Family, Kind, families, family_of, kind_of, serving
from attngen.kernels.plan import plans, read_plan, template_of
from attngen.kernels.wgmma.shared import NEEDS
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT, TARGETS
from tests.support.paths import ROOT

PACKAGE = ROOT / "attngen"
KERNELS = PACKAGE / "kernels"
NAMES = {name: family for family in families() for name in family.kernels}
PROBLEM = Problem(
    *("fwd", "bf16", "bf16", "bf16", 128, 128, ("causal",), (), "vanilla"),
    *("dense", "dense", "tma", "range"),
)
OTHER = replace(DEFAULT, name="sm_75", capability=(7, 5), instructions=frozenset())


def folder_of(family: Family) -> Path:
    """The folder of a family's module."""
    return PACKAGE.joinpath(*type(family).__module__.split(".")[1:-1])


@cache
def strings_in(path: Path) -> list[str]:
    """Every string of a module, docstrings among them."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = (node.value for node in nodes if isinstance(node, ast.Constant))
    return [value for value in found if isinstance(value, str)]


def test_a_family_is_every_folder_that_says_so() -> None:
    found = {path.parent for path in KERNELS.rglob("*/family.py")}
    assert {folder_of(each) for each in families()} == found and len(found) > 3


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_named_in_the_folder_of_its_family_alone(name: str) -> None:
    """Support's kernels are named where they are planned, too, by other families."""
    word = re.compile(rf"(?<![a-z0-9_]){name}(?![a-z0-9_])" if "_" in name else rf"\A{name}\Z")
    homes = {folder_of(NAMES[name]), KERNELS / "support"}
    for path in PACKAGE.rglob("*.py"):
        if not homes & {*path.parents}:
            assert not any(map(word.search, strings_in(path))), path


def test_no_module_outside_kernels_asks_for_the_class_of_a_plan() -> None:
    """Nor for that of a kernel's template."""
    classes = {kind.plan.__name__ for family in families() for kind in family.kernels.values()}
    assert len(classes) > 5
    for path in PACKAGE.rglob("*.py"):
        if KERNELS in path.parents:
            continue
        nodes = ast.walk(ast.parse(path.read_text()))
        assert not {node.id for node in nodes if isinstance(node, ast.Name)} & classes, path


def test_a_prefix_of_names_is_said_once_for_an_instruction() -> None:
    said = [path for path in PACKAGE.rglob("*.py") if "sm90_" in path.read_text()]
    assert said == [KERNELS / "wgmma" / "shared.py"]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_a_plan_and_a_template(name: str) -> None:
    kind = kind_of(name)
    assert family_of(name) is NAMES[name] and issubclass(kind.plan, KernelPlan)
    assert (ROOT / "templates" / "kernels" / f"{kind.template}.cu.j2").is_file()


def test_an_unknown_kernel_is_refused_with_those_that_there_are() -> None:
    for data in ({}, {"family": "gone"}, {"family": 1}):
        with pytest.raises(ValueError, match="is unknown; known: .*mask_pack"):
            read_plan(data)


def test_a_plan_is_read_as_the_class_of_its_kernel() -> None:
    for plan in plans(replace(PROBLEM, attn_mask=True), DEFAULT.name):
        assert read_plan(to_data(plan)) == plan and type(plan) is kind_of(plan.family).plan


def test_a_problem_on_a_target_that_no_family_serves_is_refused_with_every_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TARGETS, OTHER.name, OTHER)
    with pytest.raises(PlanError) as caught:
        plans(PROBLEM.backward(), OTHER.name)
    lacking = [reason.partition(": ")[2] for reason in caught.value.reasons]
    assert lacking == [f"sm_75 has no {each}" for each in ("cp_async", *sorted(NEEDS))]
    family = serving(PROBLEM, DEFAULT)
    assert family.refusals(PROBLEM, DEFAULT) == [] != family.refusals(PROBLEM, OTHER)


def test_a_family_of_another_target_serves_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of other instructions stands beside those that there are."""

    class Plan(KernelPlan):
        arch, family, threads = "sm_75", "sm75_fwd", 128

    class Elsewhere(Family):
        avoids = frozenset({"wgmma"})
        kernels = {"sm75_fwd": Kind(Plan, "other/forward/forward")}

        def computes(self, problem: Problem) -> bool:
            return problem.direction == "fwd"

        def refuses(self, problem: Problem) -> Iterator[str]:
            if problem.dropout:
                yield "no dropout yet"

        def plans(self, problem: Problem, target: object) -> tuple[KernelPlan, ...]:
            return (Plan(),)

        def render(self, *_: object) -> object:  # type: ignore[override]
            raise NotImplementedError

    monkeypatch.setitem(TARGETS, OTHER.name, OTHER)
    everyone = (Elsewhere(), *families())
    monkeypatch.setattr(registry, "families", lambda: everyone)
    monkeypatch.setattr("attngen.kernels.plan.families", lambda: everyone)
    registry._owners.cache_clear()
    try:
        (plan,) = plans(PROBLEM, "sm_75")
        assert (
            plan.family == "sm75_fwd" and template_of(plan) == "kernels/other/forward/forward.cu.j2"
        )
        assert [each.family for each in plans(PROBLEM, DEFAULT.name)][0] != "sm75_fwd"
        with pytest.raises(PlanError, match="no dropout yet"):
            plans(replace(PROBLEM, dropout=True), "sm_75")
    finally:
        registry._owners.cache_clear()
