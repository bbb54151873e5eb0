"""The compiler's version as keys have it: that of the library that is loaded."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from attngen.compiler import compile as compiler
from attngen.compiler import digest, toolchain
from attngen.compiler.builder import build_plan
from attngen.compiler.cache import Cache
from attngen.compiler.digest import cache_key
from attngen.runtime.program import Binary
from tests.support.cache_kit import ARCH, CUBIN, PROBLEM, make_binary
from tests.unit.compiler.test_digest import PLAN


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({}, None),
        ({"cuda-bindings": "13.0.1"}, None),
        ({"nvidia-cuda-nvrtc": "13.0.88"}, "13.0.88"),
        ({"nvidia-cuda-nvrtc-cu12": "12.9.86"}, "12.9.86"),
        ({"nvidia-cuda-nvrtc-cu13": "13.1.2"}, "13.1.2"),
        (
            {
                "cuda-bindings": "13.2.0",
                "nvidia-cuda-nvrtc": "13.0.88",
                "nvidia-cuda-nvrtc-cu12": "12.9.86",
            },
            "13.0.88",
        ),
        (
            {
                "cuda-bindings": "12.9.1",
                "nvidia-cuda-nvrtc": "13.0.88",
                "nvidia-cuda-nvrtc-cu12": "12.9.86",
            },
            "12.9.86",
        ),
    ],
)
def test_toolchain_is_the_installed_nvrtc_of_the_bindings_major_version(
    installed: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert toolchain.packaged_toolchain.__wrapped__() == expected


def test_toolchain_stands_beside_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("13.0.88", None):
        monkeypatch.setattr(digest, "installed_toolchain", lambda each=version: each)
        keys.append(cache_key(PROBLEM, PLAN, ARCH))
    assert keys[0].digest == keys[1].digest
    assert [key.toolchain for key in keys] == ["13.0.88", None]


def test_toolchain_agrees_with_the_compiler_that_runs() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    known = digest.installed_toolchain()
    if known is None:
        pytest.skip("NVRTC is not from a wheel")
    assert compiler.toolchain() == f"nvrtc {'.'.join(known.split('.')[:2])}"


LABELS = {  # version that the library says it has, its file → its label, beside package 13.0.88
    "the package's": ((13, 0), "/site/nvidia/cu13/lib/libnvrtc.so.13", "13.0.88"),
    "of an unknown place": ((13, 0), None, "13.0.88"),
    "of a toolkit": ((13, 1), "/usr/local/cuda/lib64/libnvrtc.so.13.1.80", "13.1.80"),
    "of a toolkit of that version": ((13, 0), "/opt/libnvrtc.so.13.0.48", "13.0.48"),
    "of a file without a version": ((13, 0), "/opt/libnvrtc.so.13", "13.0"),
    "newer under the package's place": ((13, 2), "/site/nvidia/lib/libnvrtc.so.13", "13.2"),
    "with a file's name that lies": ((13, 1), "/opt/libnvrtc.so.13.0.48", "13.1"),
}


@pytest.mark.parametrize("which", LABELS)
def test_toolchain_label_is_that_of_the_library_that_is_loaded(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, file, label = LABELS[which]
    packages = {"cuda-bindings": "13.0.1", "nvidia-cuda-nvrtc": "13.0.88"}
    monkeypatch.setattr(toolchain, "_version", packages.get)
    place = SimpleNamespace(locate_file=lambda name: f"/site/{name}")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: place)
    monkeypatch.setattr(toolchain, "mapped_file", lambda name: file)
    monkeypatch.setattr(toolchain, "_loaded", None)
    toolchain.note_loaded(*version)
    assert toolchain.installed_toolchain() == label


def test_build_stores_under_the_library_that_is_loaded_and_finds_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package's metadata name another version than the library that was found."""
    monkeypatch.setattr(toolchain, "packaged_toolchain", lambda: "13.9.1")
    monkeypatch.setattr(toolchain, "_loaded", None)
    compiled = []

    def compile_source(*_: object) -> tuple[Binary, bytes]:
        compiled.append(1)
        return make_binary(), CUBIN

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    monkeypatch.setattr(compiler, "load_toolchain", lambda: "13.0.48")
    cache = Cache(tmp_path / "cache")
    for _ in range(2):
        build_plan(PROBLEM, PLAN, ARCH, cache=cache)
    assert [entry.toolchain for entry in cache.entries()] == ["13.0.48"] and len(compiled) == 1
