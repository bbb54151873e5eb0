"""The cache as a store: round trips, toolchains, where it lies, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from attngen.compiler import digest
from attngen.compiler.cache import Cache
from attngen.errors import CacheError
from attngen.kernels.plan import plan
from tests.support.cache_kit import (
    ARCH,
    CUBIN,
    PROBLEM,
    TOOLCHAIN,
    FakeCompiler,
    make_binary,
    make_key,
    never,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def jit_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


# ---- get, put, get_or_build


def test_get_empty_cache_is_none_and_writes_nothing(cache: Cache) -> None:
    assert cache.get(make_key()) is None
    assert not cache.root.exists()


def test_put_then_get_returns_the_same_kernel(cache: Cache) -> None:
    stored = cache.put(make_key(), make_binary(), CUBIN)
    found = Cache(cache.root).get(make_key())
    assert found is not None and found.hit and not stored.hit
    assert (found.binary, found.cubin) == (stored.binary, stored.cubin) == (make_binary(), CUBIN)
    assert found.path == stored.path and found.path.is_dir()


def test_put_twice_keeps_the_later(cache: Cache) -> None:
    cache.put(make_key(), make_binary(), CUBIN)
    cache.put(make_key(), make_binary(b"new"), b"new")
    found = cache.get(make_key())
    assert found is not None and found.cubin == b"new"
    assert [path.name for path in (cache.root / "entries").iterdir()] == [found.path.name]


def test_get_other_key_is_none(cache: Cache) -> None:
    cache.put(make_key("a"), make_binary(), CUBIN)
    assert cache.get(make_key("b")) is None


def test_get_or_build_second_call_compiles_nothing(cache: Cache) -> None:
    compiler = FakeCompiler()
    first = cache.get_or_build(make_key(), compiler)
    second = cache.get_or_build(make_key(), never)
    assert (first.hit, second.hit, compiler.calls) == (False, True, 1)
    assert first.cubin == second.cubin and first.path == second.path


def test_get_or_build_failing_compiler_stores_nothing_and_frees_the_lock(cache: Cache) -> None:
    def fail() -> tuple[object, bytes]:
        raise RuntimeError("ptxas")

    with pytest.raises(RuntimeError, match="ptxas"):
        cache.get_or_build(make_key(), fail)  # type: ignore[arg-type]
    assert cache.entries() == []
    assert not cache.get_or_build(make_key(), FakeCompiler()).hit


def test_entry_checksums_are_those_of_sha256sum(cache: Cache) -> None:
    path = cache.put(make_key(), make_binary(), CUBIN).path
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_hit_takes_no_lock_and_opens_nothing_for_writing(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(make_key(), make_binary(), CUBIN)
    (cache.root / "locks").rmdir() if (cache.root / "locks").exists() else None
    real_open = os.open

    def readonly(path: str, flags: int, *rest: object) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), path
        return real_open(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", readonly)
    assert cache.get_or_build(make_key(), never).hit
    assert not (cache.root / "locks").exists()


def test_hit_with_its_key_is_fast(cache: Cache) -> None:
    chosen = plan(PROBLEM, ARCH)
    cubin = bytes(80_000)
    cache.put(digest.cache_key(PROBLEM, chosen, ARCH), make_binary(cubin), cubin)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert cache.get_or_build(digest.cache_key(PROBLEM, chosen, ARCH), never).hit
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.010


# ---- toolchains


@pytest.mark.parametrize("others", [("13.0.88", "12.9.86"), ("12.9.86", "13.0.88")])
def test_get_no_compiler_takes_the_newest_toolchain(others: tuple[str, ...], cache: Cache) -> None:
    for version in (*others, "9.10.1"):
        data = version.encode()
        cache.put(make_key(toolchain=version), make_binary(data), data)
    found = cache.get(make_key(toolchain=None))
    assert found is not None and found.cubin == b"13.0.88"


def test_get_no_compiler_newest_damaged_takes_the_next(cache: Cache) -> None:
    for version in ("12.9.86", "13.0.88"):
        data = version.encode()
        stored = cache.put(make_key(toolchain=version), make_binary(data), data)
    (stored.path / "kernel.cubin").write_bytes(b"junk")
    found = cache.get(make_key(toolchain=None))
    assert found is not None and found.cubin == b"12.9.86"
    assert not stored.path.exists()


def test_get_other_toolchain_installed_is_a_miss(cache: Cache) -> None:
    cache.put(make_key(toolchain="12.9.86"), make_binary(), CUBIN)
    assert cache.get(make_key(toolchain="13.0.88")) is None


def test_get_other_toolchain_serves_where_the_jit_is_off(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(make_key(toolchain="12.9.86"), make_binary(b"old"), b"old")
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    assert cache.get_or_build(make_key(toolchain="13.0.88"), never).cubin == b"old"
    cache.put(make_key(toolchain="13.0.88"), make_binary(b"own"), b"own")
    cache.put(make_key(toolchain="13.1.1"), make_binary(b"new"), b"new")
    assert cache.get_or_build(make_key(toolchain="13.0.88"), never).cubin == b"own"


def test_put_without_package_metadata_takes_the_toolchain_of_the_binary(cache: Cache) -> None:
    entry = cache.put(make_key(toolchain=None), make_binary(toolchain="nvrtc 13.0"), CUBIN)
    assert [info.toolchain for info in cache.entries()] == ["13.0"]
    found = cache.get(make_key(toolchain=None))
    assert found is not None and found.path == entry.path


# ---- where it lies


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("", "/xdg", "/xdg/attngen"),
        (None, "/xdg", "/xdg/attngen"),
        (None, "relative", "/home/me/.cache/attngen"),
        (None, None, "/home/me/.cache/attngen"),
        ("~/mine", None, "/home/me/mine"),
    ],
)
def test_default_follows_the_environment(
    own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ATTNGEN_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/me")
    assert Cache.default().root == Path(expected)


# ---- ATTNGEN_DISABLE_JIT


def test_disable_jit_miss_names_kernel_place_and_command(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    key = make_key()
    with pytest.raises(CacheError) as caught:
        cache.get_or_build(key, never)
    text = str(caught.value)
    for part in (key.label, ARCH, key.digest, TOOLCHAIN, str(cache.root), key.command):
        assert part in text
    assert "ATTNGEN_DISABLE_JIT" in text and "attngen build" in text
    assert not cache.root.exists()


def test_disable_jit_hit_is_served(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(make_key(), make_binary(), CUBIN)
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    assert cache.get_or_build(make_key(), never).hit


def test_disable_jit_damaged_entry_is_an_error(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.put(make_key(), make_binary(), CUBIN).path
    (path / "kernel.cubin").write_bytes(b"junk")
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    with pytest.raises(CacheError):
        cache.get_or_build(make_key(), never)


@pytest.mark.parametrize("value", ["", "0"])
def test_disable_jit_empty_or_zero_compiles(
    value: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", value)
    assert not cache.get_or_build(make_key(), FakeCompiler()).hit


def test_metadata_tells_a_reader_what_the_kernel_is(cache: Cache) -> None:
    path = cache.put(make_key(), make_binary(), CUBIN).path
    metadata = json.loads((path / "metadata.json").read_text())
    assert metadata["label"] == "fake_a" and metadata["toolchain"] == TOOLCHAIN
    assert metadata["key"] == json.loads(make_key().material)
    assert metadata["binary"]["problem"]["head_dim_qk"] == 64
