"""Targets: architectures as values, the only place that names them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from attngen import AttentionSpec, SpecError
from attngen.fragments import features
from attngen.spec.resolve import find_violations
from attngen.targets import target
from attngen.targets.target import DEFAULT, TARGETS, earlier_of, names, of_capability
from tests.support.paths import ROOT

NAME = re.compile(r"sm_[0-9]{2,3}[a-z]?")
OTHER = replace(
    DEFAULT,
    name="sm_75",
    capability=(7, 5),
    sm_smem_bytes=64 << 10,
    instructions=frozenset(),
    fp8=False,
    chip="nvidia-t4",
    exact=False,
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
    assert of_capability((7, 5)) is OTHER and of_capability((7, 0)) is None
    assert names()[0] == DEFAULT.name and names()[-1] == other
    assert of_capability((8, 8)) is TARGETS["sm_86"]


def test_compiled_calls_find_the_architecture_while_they_are_traced() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def name_and_double(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        found = of_capability((8, 8))
        return 2 * x, found.name if found else ""

    assert name_and_double(torch.ones(2))[1] == "sm_86"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_87"), ((8, 8), "sm_86"), ((8, 9), "sm_89"),
     ((9, 0), "sm_90a"), ((12, 0), "sm_120"), ((12, 1), "sm_121"), ((12, 2), "sm_121"),
     ((10, 0), None), ((13, 0), None)],
)  # fmt: skip
def test_a_device_without_kernels_of_its_own_runs_those_of_an_earlier_minor_version(
    capability: tuple[int, int], name: str | None
) -> None:
    found = of_capability(capability)
    assert (found and found.name) == name


def test_a_cubin_of_one_capability_alone_runs_on_no_later_one() -> None:
    assert TARGETS["sm_90"].runs_on((9, 1)) and not TARGETS["sm_90a"].runs_on((9, 1))
    assert not TARGETS["sm_86"].runs_on((8, 0)) and not TARGETS["sm_86"].runs_on((9, 0))


def test_embedded_chips_run_their_own_cubins_alone() -> None:
    assert TARGETS["sm_87"].runs_on((8, 7)) and not TARGETS["sm_87"].runs_on((8, 9))
    assert not TARGETS["sm_80"].runs_on((8, 7)) and not TARGETS["sm_86"].runs_on((8, 7))
    assert [each.name for each in earlier_of("sm_89")] == ["sm_86", "sm_80"]
    assert earlier_of("sm_87") == ()


def test_a_named_target_is_taken_where_its_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "NAMED", "sm_90")
    assert of_capability((9, 0)) is TARGETS["sm_90"]
    with pytest.raises(SpecError, match="'sm_90': devices of compute capability 8.6 run .* sm_86"):
        of_capability((8, 6))
    monkeypatch.setattr(target, "NAMED", "sm_9O")
    with pytest.raises(SpecError, match="'sm_9O': .* sm_90a, sm_90$"):
        of_capability((9, 0))


def test_a_named_target_is_that_of_devices_that_are_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert target.assumed() == DEFAULT.name
    monkeypatch.setattr(target, "NAMED", "sm_86")
    assert target.assumed() == "sm_86"
    monkeypatch.setattr(target, "NAMED", "sm_9O")
    with pytest.raises(SpecError, match="'sm_9O' is no architecture; known: sm_90a, "):
        target.assumed()


def test_what_an_architecture_lacks_is_named() -> None:
    assert [*OTHER.lacks(("wgmma", "tma"))] == ["sm_75 has no tma", "sm_75 has no wgmma"]
    assert [*DEFAULT.lacks(("wgmma", "tma"))] == []


def test_a_spec_is_judged_by_what_its_architectures_have(other: str) -> None:
    known = features.scan()
    plain = AttentionSpec(head_dim=64, arch=(other,))
    assert find_violations(plain, known) == []
    (violation,) = find_violations(replace(plain, dtype="e4m3"), known)
    assert violation.field == "arch" and "sm_75" in violation.reason
    assert find_violations(replace(plain, dtype="e4m3", arch=(DEFAULT.name,)), known) == []
