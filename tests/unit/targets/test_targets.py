"""Targets: architectures as values, the only place that names them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from attngen import AttentionSpec
from attngen.fragments import features
from attngen.spec.resolve import find_violations
from attngen.targets.target import DEFAULT, TARGETS, names, of_capability
from tests.support.paths import ROOT

NAME = re.compile(r"sm_[0-9]{2,3}[a-z]?")
OTHER = replace(
    DEFAULT,
    name="sm_80",
    capability=(8, 0),
    sm_smem_bytes=164 << 10,
    instructions=frozenset(),
    fp8=False,
    chip="nvidia-a100",
)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> str:
    """A second architecture, known to all for one test."""
    monkeypatch.setitem(TARGETS, OTHER.name, OTHER)
    return OTHER.name


def test_architectures_are_named_in_targets_alone() -> None:
    package = ROOT / "attngen"
    found = {
        path.relative_to(package).as_posix(): NAME.findall(path.read_text())
        for path in package.rglob("*.py")
        if path.parent.name != "targets"
    }
    assert {path: said for path, said in found.items() if said} == {}


def test_shared_memory_is_divided_among_the_ctas_of_an_sm() -> None:
    assert DEFAULT.cta_smem_bytes == DEFAULT.sm_smem_bytes - DEFAULT.cta_reserved_bytes
    for ctas in range(1, 9):
        share = DEFAULT.smem_share(ctas) + DEFAULT.cta_reserved_bytes
        assert share * ctas <= DEFAULT.sm_smem_bytes < (share + 1) * ctas


def test_a_device_has_the_architecture_of_its_capability(other: str) -> None:
    assert of_capability(DEFAULT.capability) is DEFAULT
    assert of_capability((8, 0)) is OTHER and of_capability((7, 5)) is None
    assert names() == (DEFAULT.name, other)


def test_what_an_architecture_lacks_is_named() -> None:
    assert [*OTHER.lacks(("wgmma", "tma"))] == ["sm_80 has no tma", "sm_80 has no wgmma"]
    assert [*DEFAULT.lacks(("wgmma", "tma"))] == []


def test_a_spec_is_judged_by_what_its_architectures_have(other: str) -> None:
    known = features.scan()
    plain = AttentionSpec(head_dim=64, arch=(other,))
    assert find_violations(plain, known) == []
    (violation,) = find_violations(replace(plain, dtype="e4m3"), known)
    assert violation.field == "dtype" and "sm_80" in violation.reason
    assert find_violations(replace(plain, dtype="e4m3", arch=(DEFAULT.name,)), known) == []
