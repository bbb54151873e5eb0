"""Mounted bundles: from where, in which order, what hides what, and what is missing."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
from pathlib import Path

import pytest

import attngen
from attngen.cli import doctor
from attngen.compiler.builder import build_problem, find_kernels
from attngen.errors import BundleError, CacheError
from attngen.runtime.tracing import read
from attngen.ship import lookup as mounts
from attngen.ship.bundle import Bundle
from attngen.spec.attention_spec import AttentionSpec
from tests.support.bundle_kit import cubin_for, make_program, write
from tests.support.cache_kit import ARCH, KERNEL, PROBLEM

A, B = make_program(64, "a"), make_program(128, ("b", "c"))


@pytest.fixture(autouse=True)
def nothing_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mounts, "_loaded", [])
    monkeypatch.setattr(mounts, "_found", None)
    monkeypatch.delenv(mounts.VARIABLE, raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))


def found_cubins(head_dim: int = 64) -> list[bytes] | None:
    problem = dataclasses.replace(PROBLEM, head_dim_qk=head_dim, head_dim_v=head_dim)
    found = mounts.find(problem, ARCH)
    return None if found is None else [cubin for _, cubin in found]


def test_find_without_bundles_is_none() -> None:
    assert mounts.mounted() == [] and found_cubins() is None


def test_find_gives_the_kernels_of_a_problem_in_their_order(tmp_path: Path) -> None:
    attngen.load_bundle(write(tmp_path / "x", A, B))
    assert found_cubins(64) == [cubin_for("a")]
    assert found_cubins(128) == [cubin_for("b"), cubin_for("c")]
    assert found_cubins(96) is None and mounts.find(A.problem, "sm_80") is None


def test_find_gives_kernels_of_an_earlier_minor_version_that_fit(tmp_path: Path) -> None:
    """Kernels of its own version come first, in whichever bundle they are."""
    older, own = (
        dataclasses.replace(make_program(64, tag, arch=arch), arch=arch)
        for tag, arch in (("a", "sm_80"), ("b", "sm_86"))
    )
    attngen.load_bundle(write(tmp_path / "older", older))
    for arch, found in (("sm_80", True), ("sm_86", True), ("sm_89", True), ("sm_90a", False)):
        assert (mounts.find(A.problem, arch) is not None) == found
    attngen.load_bundle(write(tmp_path / "own", own))
    attngen.load_bundle(write(tmp_path / "again", older))
    for arch, tag in (("sm_80", "a"), ("sm_86", "b"), ("sm_89", "b")):
        assert [cubin for _, cubin in mounts.find(A.problem, arch) or ()] == [cubin_for(tag)]


def test_find_passes_over_kernels_that_ask_for_more_memory(tmp_path: Path) -> None:
    large = dataclasses.replace(KERNEL, smem_bytes=120 << 10)
    program = make_program(64, "a", arch="sm_80", kernel=large)
    attngen.load_bundle(write(tmp_path / "x", dataclasses.replace(program, arch="sm_80")))
    found = [arch for arch in ("sm_80", "sm_86", "sm_89") if mounts.find(A.problem, arch)]
    assert found == ["sm_80"]


def test_find_latest_loaded_then_environment_then_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / tag, make_program(64, tag)) for tag in "abcd"]
    monkeypatch.setenv(mounts.VARIABLE, os.pathsep.join(map(str, paths[:2])))

    class Point:
        name = "acme"

        def load(self) -> object:
            return lambda: paths[2]

    monkeypatch.setattr(mounts.importlib.metadata, "entry_points", lambda group: [Point()])
    assert [bundle.path for bundle in mounts.mounted()] == paths[:3]
    assert found_cubins() == [cubin_for("a")]
    attngen.load_bundle(paths[2])
    attngen.load_bundle(paths[3])
    assert [bundle.path for bundle in mounts.mounted()] == [paths[3], paths[2], *paths[:3]]
    assert found_cubins() == [cubin_for("d")]


def test_load_bundle_again_moves_it_to_the_front(tmp_path: Path) -> None:
    paths = [write(tmp_path / tag, make_program(64, tag)) for tag in "ab"]
    for path in (*paths, paths[0]):
        attngen.load_bundle(path)
    assert [bundle.path for bundle in mounts.mounted()] == paths


def test_environment_empty_parts_and_home_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "x", A)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(mounts.VARIABLE, os.pathsep.join(["", "~/x", ""]))
    assert [bundle.path for bundle in mounts.mounted()] == [tmp_path / "x"]


def test_environment_damaged_bundle_is_refused_in_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x", A)
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setenv(mounts.VARIABLE, str(path))
    for _ in range(2):
        with pytest.raises(BundleError, match=str(path)):
            find_kernels(PROBLEM, ARCH)


def test_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "acme"

        def load(self) -> object:
            raise ImportError("no acme")

    monkeypatch.setattr(mounts.importlib.metadata, "entry_points", lambda group: [Point()])
    with pytest.raises(BundleError, match="acme of attngen.bundles.*no acme"):
        mounts.mounted()


def test_entry_point_that_mounts_a_bundle_itself_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x", A)

    class Point:
        name = "acme"

        def load(self) -> object:
            with mounts._lock:  # as load_bundle takes it
                return lambda: path

    monkeypatch.setattr(mounts.importlib.metadata, "entry_points", lambda group: [Point()])
    assert [bundle.path for bundle in mounts.mounted()] == [path]


def test_load_bundle_hiding_other_kernels_warns_and_equal_ones_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, same, other = (write(tmp_path / n, make_program(64, t)) for n, t in ("1a", "2a", "3b"))
    with caplog.at_level(logging.WARNING, logger="attngen"):
        attngen.load_bundle(one)
        attngen.load_bundle(write(tmp_path / "4", B))
        attngen.load_bundle(write(tmp_path / "5", B, make_program(64, "a", "other title")))
        assert caplog.records == []
        attngen.load_bundle(other)
    (record, *more) = caplog.records
    assert str(one) in record.getMessage() or str(tmp_path / "5") in record.getMessage()
    assert all(str(other) in each.getMessage() for each in (record, *more))
    shadowed = mounts.find_shadowed([Bundle(one), Bundle(same), Bundle(other)])
    assert [(each.shadowed, each.differing) for each in shadowed] == [(same, False), (other, True)]
    assert {each.used for each in shadowed} == {one}


def test_load_bundle_hiding_many_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dims = range(8, 88, 8)
    attngen.load_bundle(write(tmp_path / "1", *(make_program(dim, "a") for dim in dims)))
    with caplog.at_level(logging.WARNING, logger="attngen"):
        attngen.load_bundle(write(tmp_path / "2", *(make_program(dim, "b") for dim in dims)))
    (record,) = caplog.records
    assert "causal_d16_bf16 (fwd, sm_90a)" in record.getMessage()
    assert record.getMessage().endswith(" and 7 more")


SPECS = """
[[kernel]]
name = "here"
head_dim = 64
mask = "causal"
[[kernel]]
name = "absent"
head_dim = [96, 112]
directions = ["fwd", "bwd"]
"""


def test_load_bundle_require_lists_all_that_is_missing_with_the_command(tmp_path: Path) -> None:
    specs = tmp_path / "my specs.toml"
    specs.write_text(SPECS)
    path = write(tmp_path / "x", A)
    with pytest.raises(BundleError) as caught:
        attngen.load_bundle(path, require=specs)
    *missing, command = caught.value.reasons
    assert len(missing) == 4 and all("absent-" in reason for reason in missing)
    assert "full_d96_bf16 (bwd, sm_90a)" in missing[1]
    assert command == f"build them: attngen bundle build '{specs}' -o NAME.attn"
    assert mounts.mounted() == [], "a bundle that is refused is not mounted"


def test_load_bundle_require_is_content_with_what_several_bundles_have(tmp_path: Path) -> None:
    wanted = [AttentionSpec(head_dim=dim, mask="causal") for dim in (64, 128)]
    attngen.load_bundle(write(tmp_path / "b", B))
    assert attngen.load_bundle(write(tmp_path / "a", A), require=wanted).path.name == "a"


def test_load_bundle_damaged_is_refused_and_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"junk")
    with pytest.raises(BundleError, match="not a bundle"):
        attngen.load_bundle(tmp_path / "x")
    assert mounts.mounted() == []


def test_find_kernels_takes_a_bundle_before_cache_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attngen.load_bundle(write(tmp_path / "x", A))
    monkeypatch.setattr("attngen.compiler.builder.build_problem", None)
    ((binary, cubin),) = find_kernels(A.problem, ARCH)
    assert (binary, cubin) == (A.binaries[0], cubin_for("a"))


def test_find_kernels_absent_and_jit_disabled_says_where_it_looked_and_what_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    attngen.load_bundle(write(tmp_path / "x", A))
    absent = dataclasses.replace(B.problem, direction="bwd")
    with pytest.raises(CacheError) as caught:
        find_kernels(absent, ARCH)
    text = str(caught.value)
    looked = f"is in no mounted bundle; mounted: {tmp_path / 'x'}"
    assert f"causal_d128_bf16 (bwd, sm_90a) {looked}" in text
    for kernel in ("bwd_prepare", "sm90_bwd", "bwd_convert"):
        assert f"{kernel}__causal_d128_bf16 for sm_90a is not in the cache" in text
    # The command's trace is one that a build reads.
    (line,) = (reason for reason in caught.value.reasons if "--from-trace -" in reason)
    shell = line.partition(": ")[2].partition(" | ")[0]
    printed = subprocess.run(["sh", "-c", shell], capture_output=True, check=True).stdout
    (tmp_path / "trace").write_bytes(printed)
    assert read(tmp_path / "trace") == [(absent, ARCH)]


def test_find_kernels_absent_from_bundles_compiles(tmp_path: Path) -> None:
    attngen.load_bundle(write(tmp_path / "x", B))
    ((binary, cubin),) = find_kernels(PROBLEM, ARCH, kernel="sm90_fwd")
    (built,) = build_problem(PROBLEM, ARCH, kernel="sm90_fwd")
    assert built.from_cache and (built.binary, built.cubin) == (binary, cubin)


def test_doctor_names_bundles_and_what_they_hide(tmp_path: Path) -> None:
    assert doctor.check_bundles().startswith("none mounted")
    one = attngen.load_bundle(write(tmp_path / "1", A))
    assert doctor.check_bundles() == f"{one.path} (variants: 1)"
    attngen.load_bundle(write(tmp_path / "2", make_program(64, "b")))
    with pytest.raises(doctor.Missing, match="has otherwise: 1, .*1 behind .*2"):
        doctor.check_bundles()
