"""Damage of every kind to an entry is a miss, is removed, and is built again as it was."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attngen.compiler import cache_entry
from attngen.compiler.cache import Cache
from attngen.compiler.cache_entry import Defect
from attngen.io.values import to_data
from tests.support.cache_kit import (
    CUBIN,
    FakeCompiler,
    make_binary,
    make_key,
    never,
    rewrite_metadata,
    seal,
)

pytestmark = pytest.mark.timeout(60)
FILES = ("kernel.cubin", "metadata.json", "SHA256SUMS")


@pytest.fixture(autouse=True)
def jit_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def path(cache: Cache) -> Path:
    """A sound entry of the cache."""
    entry = cache.put(make_key(), make_binary(), CUBIN)
    assert entry.path is not None
    return entry.path


def check_rebuilt(cache: Cache, path: Path) -> None:
    """A call compiles once, with the right result; the next one finds that; nothing is left."""
    compiler = FakeCompiler()
    built = cache.get_or_build(make_key(), compiler)
    assert (compiler.calls, built.hit, built.cubin, built.path) == (1, False, CUBIN, path)
    found = cache.get_or_build(make_key(), never)
    assert (found.binary, found.cubin) == (make_binary(), CUBIN)
    assert cache.verify() == [] and [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FILES)
def test_read_any_bit_flipped_is_a_defect(name: str, path: Path) -> None:
    good = (path / name).read_bytes()
    with open(path / name, "r+b", buffering=0) as file:
        for bit in range(8 * len(good)):
            byte = good[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(Defect):
                cache_entry.read(path)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
    assert cache_entry.read(path).cubin == CUBIN


@pytest.mark.parametrize("name", FILES)
def test_read_any_shorter_or_longer_file_is_a_defect(name: str, path: Path) -> None:
    good = (path / name).read_bytes()
    for damaged in (*(good[:length] for length in range(len(good))), good + b"\n", good + b"\0"):
        (path / name).write_bytes(damaged)
        with pytest.raises(Defect):
            cache_entry.read(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_file_truncated_is_rebuilt(name: str, part: float, cache: Cache, path: Path) -> None:
    os.truncate(path / name, int(part * (path / name).stat().st_size))
    check_rebuilt(cache, path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.99])
def test_file_with_a_flipped_bit_is_rebuilt(
    name: str, part: float, cache: Cache, path: Path
) -> None:
    data = bytearray((path / name).read_bytes())
    data[int(part * len(data))] ^= 0x10
    (path / name).write_bytes(data)
    check_rebuilt(cache, path)


def _swap_for_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _swap_for_link(target: str) -> Callable[[Path], None]:
    def swap(file: Path) -> None:
        file.unlink()
        file.symlink_to(target)

    return swap


def _swap_for_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


FILE_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 9),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "directory": _swap_for_directory,
    "dangling link": _swap_for_link("nowhere"),
    "link to itself": _swap_for_link("kernel.cubin"),
    "link to a directory": _swap_for_link("."),
    "link to a device": _swap_for_link("/dev/zero"),
    "pipe": _swap_for_pipe,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", FILE_DAMAGE)
def test_file_damaged_is_rebuilt(name: str, damage: str, cache: Cache, path: Path) -> None:
    FILE_DAMAGE[damage](path / name)
    assert [problem.path for problem in cache.verify()] == [path]
    check_rebuilt(cache, path)


def _replace_entry(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        shutil.rmtree(path)
        make(path)

    return replace


ENTRY_DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": _replace_entry(Path.mkdir),
    "a file": _replace_entry(lambda path: path.write_text("junk")),
    "dangling link": _replace_entry(lambda path: path.symlink_to("nowhere")),
    "link to itself": _replace_entry(lambda path: path.symlink_to(path.name)),
    "link to root": _replace_entry(lambda path: path.symlink_to("/")),
    "pipe": _replace_entry(os.mkfifo),
    "full of junk": _replace_entry(lambda path: (path / "a" / "b").mkdir(parents=True)),
}


@pytest.mark.parametrize("damage", ENTRY_DAMAGE)
def test_entry_replaced_is_rebuilt(damage: str, cache: Cache, path: Path) -> None:
    ENTRY_DAMAGE[damage](path)
    assert [problem.path for problem in cache.verify()] == [path]
    check_rebuilt(cache, path)


def test_entry_gone_is_a_plain_miss(
    cache: Cache, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(path)
    with caplog.at_level(logging.WARNING, logger="attngen"):
        check_rebuilt(cache, path)
    assert caplog.records == []


def test_entry_linked_from_elsewhere_is_a_hit(cache: Cache, path: Path, tmp_path: Path) -> None:
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert cache.get_or_build(make_key(), never).cubin == CUBIN


def test_entry_linked_and_damaged_loses_the_link_and_spares_its_target(
    cache: Cache, path: Path, tmp_path: Path
) -> None:
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    (tmp_path / "moved" / "kernel.cubin").write_bytes(b"junk")
    check_rebuilt(cache, path)
    assert not path.is_symlink() and (tmp_path / "moved" / "kernel.cubin").read_bytes() == b"junk"


# Damage that the checksums do not show, as only a program could do it.


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": None},
        {"key": {"arch": "sm_80"}},
        {"key": None},
        {"binary": {}},
        {"binary": None},
        {"binary": {**to_data(make_binary()), "schema": 1000}},
        {"binary": {**to_data(make_binary()), "unknown": 1}},
        {"binary": to_data(make_binary(b"another cubin"))},
    ],
    ids=lambda changes: json.dumps(changes)[:40],
)
def test_metadata_that_does_not_fit_is_rebuilt(
    changes: dict[str, object], cache: Cache, path: Path
) -> None:
    rewrite_metadata(path, **changes)
    check_rebuilt(cache, path)


@pytest.mark.parametrize(
    "text",
    [b"[]", b"null", b"1", b'"x"', b"{}", b"", b"\xff", b"[" * 9, b"[" * 99_999],
    ids=lambda text: repr(text[:9]),
)
def test_metadata_of_another_form_is_rebuilt(text: bytes, cache: Cache, path: Path) -> None:
    (path / "metadata.json").write_bytes(text)
    seal(path)
    assert [info.label for info in cache.entries()] == ["(defective)"]
    check_rebuilt(cache, path)


def test_entry_of_another_key_under_this_name_is_rebuilt(cache: Cache, path: Path) -> None:
    other = cache.put(make_key("b"), make_binary(b"other"), b"other").path
    assert other is not None
    shutil.rmtree(path)
    other.rename(path)
    assert [problem.path for problem in cache.verify()] == [path]
    check_rebuilt(cache, path)


def test_entry_of_colliding_digest_is_never_used(cache: Cache) -> None:
    cache.put(make_key(), make_binary(), CUBIN)
    impostor = make_key("b")
    object.__setattr__(impostor, "digest", make_key().digest)
    assert cache.get(impostor) is None


def test_damage_is_logged_with_kernel_place_and_reason(
    cache: Cache, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path / "kernel.cubin").write_bytes(b"junk")
    with caplog.at_level(logging.WARNING, logger="attngen"):
        cache.get(make_key())
    (record,) = caplog.records
    for part in ("fake_a", str(path), "SHA256SUMS"):
        assert part in record.getMessage()


def test_damage_that_cannot_be_removed_still_builds(
    cache: Cache, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path / "kernel.cubin").write_bytes(b"junk")

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", fail)
    entry = cache.get_or_build(make_key(), FakeCompiler())
    assert entry.cubin == CUBIN and entry.path is None
