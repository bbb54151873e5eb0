"""Many processes and threads on one cache, and processes that die in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from attngen.compiler.cache import Cache, Entry
from tests.support.cache_kit import CUBIN, FakeCompiler, make_binary, make_key, start_python

pytestmark = pytest.mark.timeout(60)

# Each compile leaves a line; the processes start together, once the file `go` is there, and take
# the keys in orders of their own.
KEYS = "abcd"
BUILDER = """
import os, random, sys, time
from pathlib import Path
from attngen.compiler.cache import Cache
from tests.support.cache_kit import CUBIN, make_binary, make_key
root, compiled, go = map(Path, sys.argv[1:4])
keys = list(sys.argv[4])
random.shuffle(keys)

def compile_now(tag):
    with open(compiled, "a") as file:
        file.write(tag)
    time.sleep(0.2)
    cubin = CUBIN + tag.encode()
    return make_binary(cubin), cubin

print("ready", flush=True)
while not go.exists():
    time.sleep(0.005)
for tag in keys:
    entry = Cache(root).get_or_build(make_key(tag), lambda: compile_now(tag))
    cubin = CUBIN + tag.encode()
    assert entry.cubin == cubin and entry.binary == make_binary(cubin)
    print("hit" if entry.hit else "built")
"""

# Stores an entry where there is none, then over itself, killed at every line of that; after each
# kill the cache must be whole and usable.
KILLER = """
import json, sys
from attngen.compiler.cache import Cache
from tests.support.cache_kit import CUBIN, FakeCompiler, make_binary, make_key, never
from tests.support.kill_kit import killed_at_each_line

cache, key, binary = Cache(sys.argv[1]), make_key(), make_binary()

def store_twice():
    for _ in range(2):
        cache.put(key, binary, CUBIN)

seen = {"none": 0, "whole": 0, "left": 0}
cache.put(make_key("kept"), binary, CUBIN)
for lived in killed_at_each_line(store_twice):
    assert cache.verify() == []
    assert cache.get_or_build(make_key("kept"), never).hit
    seen["left"] += sum(path.name.startswith(".tmp-") for path in cache._scan())
    entry = cache.get(key)
    assert entry is None and not lived or (entry.cubin, entry.binary) == (CUBIN, binary)
    seen["none" if entry is None else "whole"] += 1
    rebuilt = cache.get_or_build(key, FakeCompiler())
    assert rebuilt.cubin == CUBIN and rebuilt.path is not None
    assert cache.get_or_build(key, never).hit
    cache.clear()
    assert cache._scan() == []
    cache.put(make_key("kept"), binary, CUBIN)
print(json.dumps(seen))
"""

# Takes the lock, says so, and never comes back.
HANGING_BUILDER = """
import sys, time
from attngen.compiler.cache import Cache
from tests.support.cache_kit import make_key

def compile_now():
    print("compiling", flush=True)
    time.sleep(600)

Cache(sys.argv[1]).get_or_build(make_key(), compile_now)
"""


@pytest.fixture(autouse=True)
def jit_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)


def wait_for_line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == f"{expected}\n", process.communicate()[1]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("keys", [KEYS[:1], KEYS])
def test_32_processes_on_a_cold_cache_compile_each_key_once(keys: str, tmp_path: Path) -> None:
    compiled, go = tmp_path / "compiled", tmp_path / "go"
    cache = tmp_path / "cache"
    processes = [start_python(BUILDER, cache, compiled, go, keys) for _ in range(32)]
    try:
        for process in processes:
            wait_for_line(process, "ready")
        go.touch()
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            kill(process)
    assert [process.returncode for process in processes] == [0] * 32, done
    lines = Counter(line for out, _ in done for line in out.split())
    assert lines == {"built": len(keys), "hit": 31 * len(keys)}
    assert sorted(compiled.read_text()) == list(keys)
    assert Cache(cache).verify() == []


def test_sixteen_threads_on_one_key_compile_once(tmp_path: Path) -> None:
    compiler, entries = FakeCompiler(), list[Entry]()
    barrier = threading.Barrier(16)

    def slow() -> tuple[object, bytes]:
        time.sleep(0.2)
        return compiler()

    def build() -> None:
        barrier.wait()
        entries.append(Cache(tmp_path).get_or_build(make_key(), slow))  # type: ignore[arg-type]

    threads = [threading.Thread(target=build) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert compiler.calls == 1 and len(entries) == 16
    assert sum(entry.hit for entry in entries) == 15


def test_threads_on_different_keys_compile_at_the_same_time(tmp_path: Path) -> None:
    cache, meeting = Cache(tmp_path), threading.Barrier(4)

    def build(tag: str) -> None:
        def compile_now() -> tuple[object, bytes]:
            meeting.wait(timeout=20)  # passes only when all four are compiling
            return make_binary(), CUBIN

        cache.get_or_build(make_key(tag), compile_now)  # type: ignore[arg-type]

    threads = [threading.Thread(target=build, args=(tag,)) for tag in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(cache.entries()) == 4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_writer_killed_at_any_line_leaves_whole_entries_or_none(tmp_path: Path) -> None:
    process = start_python(KILLER, tmp_path / "cache")
    out, err = process.communicate()
    assert process.returncode == 0, err
    seen = json.loads(out)
    assert min(seen.values()) > 0, f"no kill fell into some part of a write: {seen}"


# Is about to publish an entry, says so, and never does.
HANGING_WRITER = """
import os, sys, time
from attngen.compiler import cache_entry
from attngen.compiler.cache import Cache
from tests.support.cache_kit import CUBIN, make_binary, make_key
cache_entry.sync_directory = lambda path: (print("writing", flush=True), time.sleep(600))
Cache(sys.argv[1]).put(make_key("slow"), make_binary(), CUBIN)
"""


@pytest.mark.parametrize("age", [-1e9, 0.0, 1e9])
def test_what_a_living_writer_has_aside_stays_and_a_dead_ones_goes(
    age: float, tmp_path: Path
) -> None:
    """Whatever the clock says: that of the writer's machine, or this one's, may be wrong."""
    cache, process = Cache(tmp_path), start_python(HANGING_WRITER, tmp_path)

    def aside() -> list[Path]:
        parts = (cache.root / "entries", cache.root / "locks")
        return [path for part in parts for path in part.glob(".tmp-*")]

    try:
        wait_for_line(process, "writing")
        assert len(aside()) == 2
        for path in aside():
            os.utime(path, (time.time() - age,) * 2)
        for upkeep in (
            lambda: cache.put(make_key(), make_binary(), CUBIN),
            cache.prune,
            cache.clear,
        ):
            upkeep()
            assert len(aside()) == 2
            assert [p for p in cache.verify() if "died" in p.reason] == []
    finally:
        kill(process)
    cache.put(make_key(), make_binary(), CUBIN)
    assert aside() == []


def test_builder_killed_while_compiling_frees_its_lock(tmp_path: Path) -> None:
    process = start_python(HANGING_BUILDER, tmp_path)
    try:
        wait_for_line(process, "compiling")
    finally:
        kill(process)
    start = time.monotonic()
    assert not Cache(tmp_path).get_or_build(make_key(), FakeCompiler()).hit
    assert time.monotonic() - start < 5


def test_readers_during_clearing_and_rebuilding_see_whole_kernels(tmp_path: Path) -> None:
    """Entries vanish and come back under the readers: each gets the right bytes all the same."""
    cache, stop, failures = Cache(tmp_path), threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                assert cache.get_or_build(make_key(), FakeCompiler()).cubin == CUBIN
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        cache.clear()
        time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
    assert failures == []
    assert cache.verify() == []
