"""Whose kernels a cache on a shared disk gives: its user's, root's and named users' alone."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from attngen.compiler import cache as cache_module
from attngen.compiler.cache import Cache
from attngen.errors import CacheError
from attngen.io import trust
from tests.support.cache_kit import CUBIN, FakeCompiler, make_binary, make_key, never, seal

pytestmark = pytest.mark.timeout(60)
FILES = ("kernel.cubin", "metadata.json", "SHA256SUMS")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setattr(cache_module, "_told", set())


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def path(cache: Cache) -> Path:
    """A sound entry, in which another could have planted another cubin."""
    entry = cache.put(make_key(), make_binary(), CUBIN)
    assert entry.path is not None
    plant(entry.path)
    return entry.path


def plant(entry: Path) -> None:
    cubin = b"\x7fELF PLANTED"
    (entry / "kernel.cubin").write_bytes(cubin)
    metadata = json.loads((entry / "metadata.json").read_text())
    metadata["binary"]["cubin_sha256"] = hashlib.sha256(cubin).hexdigest()
    (entry / "metadata.json").write_text(json.dumps(metadata))
    seal(entry)


def check_not_used(cache: Cache, caplog: pytest.LogCaptureFixture, stored: bool) -> str:
    """The one line in the log of a kernel that is compiled instead of the planted one."""
    with caplog.at_level(logging.WARNING, logger="attngen"):
        for _ in range(2):
            assert cache.get(make_key()) is None
        built = cache.get_or_build(make_key(), FakeCompiler())
        assert built.cubin == CUBIN and (built.path is not None) == stored
        if not stored:
            assert cache.get_or_build(make_key(), FakeCompiler()).path is None
    (record,) = caplog.records
    return record.getMessage()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o2775])
@pytest.mark.parametrize("place", ["root", "entries", "locks"])
def test_directory_that_others_write_to_is_neither_used_nor_added_to(
    place: str, mode: int, cache: Cache, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.get(make_key()) is not None
    target = cache.root if place == "root" else cache.root / place
    target.chmod(mode)
    before = sorted(cache.root.rglob("*"))
    said = check_not_used(cache, caplog, stored=False)
    who = "anyone" if mode & stat.S_IWOTH else "its group"
    assert f"{target} may be written to by {who}" in said and "chmod" in said
    assert sorted(cache.root.rglob("*")) == before, "nor is a lock made there"
    assert any("not used" in problem.reason for problem in cache.verify())


@pytest.mark.parametrize("name", ["", *FILES])
@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_entry_or_file_that_others_write_to_is_replaced_by_ones_own(
    name: str, mode: int, cache: Cache, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path / name).chmod(mode | (0 if name else 0o111))
    said = check_not_used(cache, caplog, stored=True)
    assert "may be written to by" in said and str(path) in said
    assert cache.get_or_build(make_key(), never).cubin == CUBIN


def test_sticky_directory_will_do_as_a_place_for_a_cache(
    cache: Cache, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone may add to /tmp, but not replace what lies in it. Not so among entries."""
    cache.root.chmod(0o1777)
    assert cache.get(make_key()) is not None
    (cache.root / "entries").chmod(0o1777)
    assert "entries may be written to by anyone" in check_not_used(cache, caplog, stored=False)


@as_root
@pytest.mark.parametrize("of", ["root", "entries", "entry", *FILES])
def test_what_belongs_to_another_user_is_used_only_where_the_user_is_named(
    of: str,
    cache: Cache,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {"root": cache.root, "entries": path.parent, "entry": path}
    os.chown(places.get(of, path / of), 12345, -1)
    monkeypatch.setenv(trust.VARIABLE, "7, 12345")
    assert cache.get(make_key()) is not None
    monkeypatch.setenv(trust.VARIABLE, "7")
    said = check_not_used(cache, caplog, stored=of not in ("root", "entries"))
    assert "belongs to user 12345" in said and trust.VARIABLE in said


def test_root_is_trusted_by_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert trust.trusted_uids() == {0, 4711}
    monkeypatch.setenv(trust.VARIABLE, "1,2 3")
    assert trust.trusted_uids() == {0, 1, 2, 3, 4711}


@pytest.mark.parametrize("value", ["9" * 5000, "alice", "1,-2", "1;2", "0x10"])
def test_named_users_that_are_no_numbers_are_refused(
    value: str, cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trust.VARIABLE, value)
    with pytest.raises(CacheError, match=f"{trust.VARIABLE} has .*numbers of users"):
        cache.get(make_key())


def test_disabled_jit_says_that_the_cache_is_not_trusted(
    cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.root.chmod(0o777)
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    with pytest.raises(CacheError, match="nothing in .* is used, since .* written to by anyone"):
        cache.get_or_build(make_key(), never)


@pytest.fixture(params=[0o000, 0o002, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_what_is_stored_is_trusted_whatever_the_umask(cache: Cache, umask: int) -> None:
    assert cache.get_or_build(make_key(), FakeCompiler()).path is not None
    assert cache.get_or_build(make_key(), never).hit
    made = [cache.root, *cache.root.rglob("*")]
    assert len(made) > 6
    for each in made:
        wanted = 0o755 if each.is_dir() else 0o644
        assert stat.S_IMODE(each.stat().st_mode) == wanted & ~umask, each


# ---- links


def test_nothing_is_written_through_links_in_the_cache(cache: Cache, tmp_path: Path) -> None:
    elsewhere = {name: tmp_path / f"elsewhere-{name}" for name in ("entries", "locks")}
    cache.root.mkdir()
    for name, target in elsewhere.items():
        target.mkdir()
        (cache.root / name).symlink_to(target)
    assert cache.get_or_build(make_key(), FakeCompiler()).path is None
    assert all(list(target.iterdir()) == [] for target in elsewhere.values())
    for target in elsewhere.values():
        (target / ".tmp-0").write_text("")
    (elsewhere["locks"] / "0").write_text("")
    cache.prune()
    cache.clear()
    assert [len(list(target.iterdir())) for target in elsewhere.values()] == [1, 2]


def test_root_may_be_a_link_of_its_user(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    cache.root.symlink_to(tmp_path / "disk")
    assert cache.get_or_build(make_key(), FakeCompiler()).path is not None
    assert cache.get_or_build(make_key(), never).hit
