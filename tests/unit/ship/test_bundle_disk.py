"""Bundles and caches on disks that are full or read-only, and writers that are killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bundle_kit import make_program, read_all, write
from tests.support.cache_kit import ROOT, start_python

pytestmark = pytest.mark.timeout(120)

# Writes one bundle over another, killed at every line of that; then looks what is there.
KILLER = """
import json, sys
from pathlib import Path
from attngen.ship.bundle import Bundle
from tests.support.bundle_kit import make_program, write
from tests.support.kill_kit import killed_at_each_line

path = Path(sys.argv[1])
old, new = make_program(64, "a"), make_program(64, "b")
seen = {"old": 0, "new": 0, "left": 0}
write(path, old)
for lived in killed_at_each_line(lambda: write(path, new)):
    (found,) = Bundle(path).verify()
    changed = found.binaries == new.binaries
    assert changed or found.binaries == old.binaries and not lived
    seen["new" if changed else "old"] += 1
    for each in path.parent.iterdir():
        if each != path:
            seen["left"] += 1
            each.unlink()
    if changed:
        write(path, old)
print(json.dumps(seen))
"""

# The largest file may have 1000 bytes: what is longer fails as on a full disk.
LIMITED = """
import resource, sys
from pathlib import Path
from attngen.compiler.cache import Cache
from tests.support.bundle_kit import make_program, write
from tests.support.cache_kit import CUBIN, FakeCompiler, make_key
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
folder = Path(sys.argv[1])
try:
    write(folder / "x", make_program(128, "abcd"))
except OSError as error:
    print("refused", error.strerror)
entry = Cache(folder / "cache").get_or_build(make_key(), FakeCompiler(bytes(5000)))
print(len(entry.cubin), entry.path)
"""

# A disk of 64 kB, then the same read-only; what is on it when it is full must survive.
SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from attngen.ship.bundle import Bundle
from attngen.compiler.cache import Cache
from tests.support.bundle_kit import make_program, read_all, write
from tests.support.cache_kit import CUBIN, FakeCompiler, make_key, never
disk = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "attngen-test", disk], check=True)
path, cache = Path(disk) / "x", Cache(Path(disk) / "cache")
write(path, make_program(64, "a"))
assert cache.get_or_build(make_key("a"), FakeCompiler()).path is not None
(Path(disk) / "filler").write_bytes(bytes(24_000))
for size in (30_000, 60_000, 200_000):
    entry = cache.get_or_build(make_key("b"), FakeCompiler(bytes(size)))
    assert (len(entry.cubin), entry.path) == (size, None), entry
def fail(*programs):
    try:
        write(path, *programs)
    except OSError as error:
        return error.strerror
print(fail(*(make_program(8 * n, "ab") for n in range(1, 20))))
assert len(read_all(path)) == 1 and cache.get_or_build(make_key("a"), never).hit
assert sorted(each.name for each in Path(disk).iterdir()) == ["cache", "filler", "x"]
assert cache.verify() == []
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
print(fail(make_program(96, "a")))
assert len(read_all(path)) == 1 and cache.get_or_build(make_key("a"), never).cubin == CUBIN
entry = cache.get_or_build(make_key("c"), FakeCompiler())
assert (entry.cubin, entry.path) == (CUBIN, None)
"""


def can_mount() -> bool:
    """Whether a process may mount a disk in a name space of its own."""
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-rm", "mount", "-t", "tmpfs", "attngen-test", "/mnt"]
    return subprocess.run(trial, capture_output=True).returncode == 0


@pytest.mark.slow
def test_writer_killed_at_any_line_leaves_one_bundle_whole(tmp_path: Path) -> None:
    process = start_python(KILLER, tmp_path / "x.attn")
    out, err = process.communicate()
    assert process.returncode == 0, err
    seen = json.loads(out)
    assert min(seen.values()) > 0, f"no kill fell into some part of a write: {seen}"


def test_write_file_that_cannot_grow_leaves_nothing(tmp_path: Path) -> None:
    process = start_python(LIMITED, tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.splitlines() == ["refused File too large", "5000 None"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        path for path in (tmp_path / "cache" / "locks").iterdir()
    ]


def test_write_over_a_bundle_that_is_mounted_elsewhere_keeps_it_usable(tmp_path: Path) -> None:
    path = write(tmp_path / "x", make_program(64, "a"))
    write(path, make_program(64, "b"))
    assert [program.kernels[0].plan for program in read_all(path)] == [{"tile": "b"}]


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a disk of its own")
def test_small_disk_full_and_then_read_only_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", SMALL_DISK, str(disk)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["No space left on device", "Read-only file system"]
    assert list(disk.iterdir()) == []
