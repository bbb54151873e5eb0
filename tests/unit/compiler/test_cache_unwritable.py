"""A cache that cannot be written, is full, or has no locks: kernels are built all the same."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

import pytest

from attngen.compiler import cache_lock
from attngen.compiler.cache import Cache
from attngen.io import file_lock
from tests.support.cache_kit import (
    CUBIN,
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


# ---- where it cannot be written


def test_put_below_a_file_returns_the_kernel_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, logger="attngen"):
        entries = [cache.get_or_build(make_key(tag), FakeCompiler()) for tag in "ab"]
    assert [(entry.hit, entry.path, entry.cubin) for entry in entries] == [(False, None, CUBIN)] * 2
    assert len(caplog.records) == 1 and str(cache.root) in caplog.text
    assert cache.entries() == [] and cache.verify() == [] and cache.clear() == 0


@pytest.mark.parametrize("name", ["mkdir", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_put_failing_system_call_returns_the_kernel_and_leaves_nothing(
    name: str,
    code: int,
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (cache.root / "entries").mkdir(parents=True)
    (cache.root / "locks").mkdir()

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    compiler = FakeCompiler()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="attngen"):
        patch.setattr(os, name, fail)
        entry = cache.get_or_build(make_key(), compiler)
    assert (entry.hit, entry.path, entry.cubin, compiler.calls) == (False, None, CUBIN, 1)
    assert len(caplog.records) == 1
    assert list((cache.root / "entries").iterdir()) == []
    again = cache.get_or_build(make_key(), compiler)
    assert again.path is not None and compiler.calls == 2


@pytest.mark.parametrize("full_after", [0, 1, 2])
def test_put_disk_full_at_any_file_leaves_nothing(
    full_after: int, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > full_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert cache.put(make_key(), make_binary(), CUBIN).path is None
    assert list((cache.root / "entries").iterdir()) == []


def test_put_directory_that_cannot_be_synced_is_stored(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    cache.put(make_key(), make_binary(), CUBIN)
    assert cache.get(make_key()) is not None


def test_get_files_that_may_not_be_read_is_a_miss_and_keeps_them(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(make_key(), make_binary(), CUBIN)
    real = os.open

    def deny(path: str | Path, *rest: object) -> int:
        if Path(path).name == "kernel.cubin":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="attngen"):
        patch.setattr(os, "open", deny)
        assert cache.get(make_key()) is None
    assert "Permission denied" in caplog.text
    assert cache.get(make_key()) is not None


# ---- locks


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINTR])
def test_get_or_build_locks_failing_builds_and_stores(
    code: int, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file_lock.fcntl, "lockf", fail)
    descriptors = os.listdir("/proc/self/fd")
    with caplog.at_level(logging.WARNING, logger="attngen"):
        assert not cache.get_or_build(make_key(), FakeCompiler()).hit
    assert cache.get_or_build(make_key(), never).hit
    assert caplog.records == [] and len(os.listdir("/proc/self/fd")) == len(descriptors)


def test_get_or_build_lock_directory_is_a_file_builds_and_stores(cache: Cache) -> None:
    cache.root.mkdir()
    (cache.root / "locks").write_text("")
    assert not cache.get_or_build(make_key(), FakeCompiler()).hit
    assert cache.get_or_build(make_key(), never).hit


def test_get_or_build_holder_that_hangs_is_waited_for_and_then_passed(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_lock, "TIMEOUT_SECONDS", 0.2)
    key = make_key()
    with cache_lock.hold(cache.root / "locks" / key.digest, "holder"):
        descriptors = os.listdir("/proc/self/fd")
        with caplog.at_level(logging.WARNING, logger="attngen"):
            start = time.monotonic()
            assert not cache.get_or_build(key, FakeCompiler()).hit
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert time.monotonic() - start >= 0.2 and "still locked" in caplog.text


def test_clear_removes_free_locks_and_spares_held_ones(cache: Cache) -> None:
    cache.get_or_build(make_key("a"), FakeCompiler())
    held = cache.root / "locks" / make_key("b").digest
    with cache_lock.hold(held, "b"):
        cache.clear()
        assert list((cache.root / "locks").iterdir()) == [held]
    cache.clear()
    assert list((cache.root / "locks").iterdir()) == []


def test_lock_file_swept_while_waited_for_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    real = file_lock.fcntl.lockf
    opened = []

    def sweep_first(descriptor: int, operation: int) -> None:
        if not opened:
            path.unlink()  # between open and lock, as a sweeper does
        opened.append(descriptor)
        real(descriptor, operation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_lock.fcntl, "lockf", sweep_first)
        with cache_lock.hold(path, "a"):
            assert path.exists()
            assert file_lock.try_lock(path) is None
