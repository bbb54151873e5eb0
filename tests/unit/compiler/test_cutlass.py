"""CUTLASS's wrappers: found without an import, in keys, and asked for by name where missing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from attngen.compiler import cutlass, digest
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import run_nvrtc
from attngen.errors import CompilerMissing
from attngen.io import files
from attngen.kernels.plan import plans
from attngen.targets.target import DEFAULT
from tests.support.forward_kit import BIAS, CAUSAL, DENSE, GATHER, PAGED

WRAPPED = '#include "attngen/mma/atoms.cuh"\n#include "attngen/mma/atoms_fp8.cuh"\n'
NOTHING = f"compiling needs {cutlass.PACKAGE}, which is not installed: pip install"


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget what a process has read of the package, before and after."""
    for known in (cutlass.atoms, cutlass.digests):
        known.cache_clear()
    yield
    for known in (cutlass.atoms, cutlass.digests):
        known.cache_clear()


@pytest.fixture
def missing(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not installed."""

    def find(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    for place in ("distribution", "version"):
        monkeypatch.setattr(cutlass.importlib.metadata, place, find)


def test_wrappers_of_the_tested_version_are_found_without_an_import() -> None:
    found = cutlass.read_atoms()
    assert found.keys() == cutlass.ATOMS.keys()
    assert {name: hashlib.sha256(text).hexdigest() for name, text in found.items()} == cutlass.ATOMS
    assert not any(name.partition(".")[0].startswith("cutlass") for name in sys.modules)


@pytest.mark.parametrize("problem", [DENSE, GATHER, PAGED, replace(BIAS, dropout=True)])
@pytest.mark.parametrize("arch", ["sm_80", DEFAULT.name])
def test_plans_name_what_their_sources_include(problem, arch) -> None:
    for plan in plans(problem, arch):
        included = cutlass.included(render_problem(problem, plan).text)
        assert plan.atoms == included and bool(included) == plan.family.startswith("mma_")


def test_sources_get_what_they_include_and_none_else() -> None:
    assert cutlass.supply(WRAPPED).keys() == cutlass.ATOMS.keys()
    assert cutlass.supply('#include "attngen/ptx/math.cuh"\n') == {}


def test_missing_package_is_an_error_that_names_the_command(missing: None) -> None:
    with pytest.raises(CompilerMissing, match=NOTHING) as caught:
        run_nvrtc(WRAPPED, "kernel.cu", "sm_80")
    assert "[compile]" in str(caught.value)
    run_nvrtc('#include "attngen/ptx/math.cuh"\n', "kernel.cu", "sm_80")


def test_package_without_the_wrappers_is_named_with_its_version(
    forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutlass, "_INSIDE", "elsewhere")
    installed = importlib.metadata.version(cutlass.PACKAGE)
    with pytest.raises(CompilerMissing, match=f"of version {installed} lacks cute/arch/copy_sm75"):
        run_nvrtc(WRAPPED, "kernel.cu", "sm_80")


def material(arch: str) -> str:
    *_, plan = plans(CAUSAL, arch)
    return digest.cache_key(CAUSAL, plan, arch).material


def test_keys_have_the_wrappers_that_kernels_include(missing: None) -> None:
    *_, plan = plans(CAUSAL, "sm_80")
    assert len(plan.atoms) == 3
    assert all(cutlass.ATOMS[name] in material("sm_80") for name in plan.atoms)
    assert "cutlass" not in material(DEFAULT.name)


def test_keys_without_the_package_are_those_of_the_tested_or_recorded_one(
    missing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {"cute/arch/mma_sm80.hpp": "of another version"}
    monkeypatch.setattr(files, "record", lambda: {"cutlass": recorded})
    assert cutlass.digests() == {**cutlass.ATOMS, **recorded}
    assert "of another version" in material("sm_80")


def test_changed_wrappers_are_seen(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cutlass.have_changed(cutlass.ATOMS)
    changed = dict.fromkeys(cutlass.ATOMS, b"other")
    monkeypatch.setattr(cutlass, "read_atoms", lambda: changed)
    assert cutlass.have_changed(cutlass.ATOMS) and not cutlass.have_changed(())
