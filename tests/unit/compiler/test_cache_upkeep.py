"""Looking after the cache: what is listed, verified, pruned and cleared."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from attngen.compiler import cache_entry, digest
from attngen.compiler.cache import Cache
from attngen.kernels.plan import plan
from tests.support.cache_kit import (
    ARCH,
    CUBIN,
    PROBLEM,
    TOOLCHAIN,
    make_binary,
    make_key,
    rewrite_metadata,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def jit_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def set_age(cache: Cache, tag: str, seconds: float) -> None:
    entry = cache.get(make_key(tag))
    assert entry is not None and entry.path is not None
    rewrite_metadata(entry.path, created=time.time() - seconds)


def age_directory(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_entries_tell_what_is_stored(cache: Cache) -> None:
    before = time.time()
    path = cache.put(make_key(), make_binary(), CUBIN).path
    (info,) = cache.entries()
    size = sum(file.stat().st_size for file in path.iterdir())
    assert before <= info.created <= time.time()
    assert dataclasses.asdict(info) == {
        "digest": make_key().digest,
        "label": "fake_a",
        "arch": ARCH,
        "toolchain": TOOLCHAIN,
        "bytes": size,
        "created": info.created,
        "path": path,
    }


def test_entries_are_listed_oldest_first_with_defective_ones(cache: Cache) -> None:
    for tag, age in (("a", 10), ("b", 30), ("c", 20)):
        cache.put(make_key(tag), make_binary(), CUBIN)
        set_age(cache, tag, age)
    path = cache.get(make_key("c")).path
    (path / "metadata.json").write_text("{")
    age_directory(path, 100)
    (cache.root / "entries" / "README").write_text("not an entry")
    assert [info.label for info in cache.entries()] == ["(defective)", "fake_b", "fake_a"]


def test_verify_sound_cache_finds_nothing(cache: Cache) -> None:
    for tag in "abc":
        cache.put(make_key(tag), make_binary(), CUBIN)
    assert cache.verify() == []


def test_verify_names_every_problem_and_removes_nothing(cache: Cache) -> None:
    paths = {tag: cache.put(make_key(tag), make_binary(), CUBIN).path for tag in "abcd"}
    (paths["a"] / "kernel.cubin").write_bytes(b"junk")
    (paths["b"] / "metadata.json").unlink()
    rewrite_metadata(paths["c"], format=99)
    stray = cache.root / "entries" / "stray"
    stray.write_text("")
    stale = cache.root / "entries" / ".tmp-dead"
    stale.mkdir()
    age_directory(stale, 1e5)
    (cache.root / "entries" / ".tmp-live").mkdir()
    problems = {problem.path: problem.reason for problem in cache.verify()}
    assert set(problems) == {paths["a"], paths["b"], paths["c"], stray, stale}
    assert "SHA256SUMS" in problems[paths["a"]] and "metadata.json" in problems[paths["b"]]
    assert "format 99" in problems[paths["c"]] and "prune" in problems[stale]
    assert all(path.exists() for path in problems)


def test_verify_source_rendered_otherwise_is_a_problem(cache: Cache) -> None:
    chosen = plan(PROBLEM, ARCH)
    entry = cache.put(digest.cache_key(PROBLEM, chosen, ARCH), make_binary(), CUBIN)
    cache.put(make_key("of other templates"), make_binary(), CUBIN)
    asked = []

    def source(problem: object, plan: object) -> str:
        asked.append((problem, plan))
        return entry.binary.source_sha256

    assert cache.verify(source) == [] and asked == [(PROBLEM, chosen)]
    (problem,) = cache.verify(lambda *_: "other")
    assert problem.path == entry.path and "rendered" in problem.reason


def test_prune_size_removes_the_oldest_until_the_rest_fits(cache: Cache) -> None:
    for tag, age in (("a", 10), ("b", 30), ("c", 20)):
        cache.put(make_key(tag), make_binary(), CUBIN)
        set_age(cache, tag, age)
    total = sum(info.bytes for info in cache.entries())
    assert cache.prune(max_bytes=total) == []
    removed = cache.prune(max_bytes=total - 1)
    assert [info.label for info in removed] == ["fake_b"] and not removed[0].path.exists()
    assert [info.label for info in cache.entries()] == ["fake_c", "fake_a"]
    assert len(cache.prune(max_bytes=0)) == 2 and cache.entries() == []


def test_prune_age_removes_the_older_and_keeps_future_ones(cache: Cache) -> None:
    for tag, age in (("a", 10), ("b", 300), ("c", -300)):
        cache.put(make_key(tag), make_binary(), CUBIN)
        set_age(cache, tag, age)
    assert [info.label for info in cache.prune(max_age_seconds=100)] == ["fake_b"]
    assert [info.label for info in cache.entries()] == ["fake_a", "fake_c"]


def test_prune_no_limit_removes_only_what_the_dead_left(cache: Cache) -> None:
    cache.put(make_key(), make_binary(), CUBIN)
    stale, fresh = (cache.root / "entries" / f".tmp-{name}" for name in ("stale", "fresh"))
    for path in (stale, fresh):
        path.mkdir()
        (path / "kernel.cubin").write_bytes(b"half")
    age_directory(stale, 2 * 3600)
    assert cache.prune() == []
    assert not stale.exists() and fresh.exists() and len(cache.entries()) == 1


def test_removal_that_was_broken_off_is_taken_up(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(make_key("a"), make_binary(), CUBIN)
    with monkeypatch.context() as patch:
        patch.setattr(cache_entry, "remove", lambda path: None)
        assert cache.clear() == 1
    (left,) = (cache.root / "entries").iterdir()
    age_directory(left, -1e9)
    cache.put(make_key("b"), make_binary(), CUBIN)
    assert not left.exists()


def test_put_removes_what_the_dead_left(cache: Cache) -> None:
    cache.put(make_key("a"), make_binary(), CUBIN)
    stale = cache.root / "entries" / ".tmp-stale"
    stale.mkdir()
    age_directory(stale, 2 * 3600)
    cache.put(make_key("b"), make_binary(), CUBIN)
    assert not stale.exists()


def test_clear_removes_entries_and_leftovers_but_nothing_foreign(
    cache: Cache, tmp_path: Path
) -> None:
    for tag in "ab":
        cache.put(make_key(tag), make_binary(), CUBIN)
    (cache.root / "entries" / ".tmp-fresh").mkdir()
    foreign = [cache.root / "README", cache.root / "entries" / "notes"]
    for path in foreign:
        path.write_text("mine")
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("")
    (cache.root / "entries" / cache_entry.entry_name("0" * 64, "1")).symlink_to(target)
    assert cache.clear() == 3
    assert {path.name for path in (cache.root / "entries").iterdir()} == {"notes"}
    assert all(path.exists() for path in (*foreign, target / "file"))
