"""Cache: compiled kernels on disk, shared by threads, processes and machines.

    <root>/entries/<digest>-<toolchain>/    one kernel; its files: cache_entry.py
    <root>/entries/.tmp-<unique>/           an entry being written, or being removed
    <root>/locks/<digest>                   held across check, compile and publish

An entry is written aside, synced, and renamed: the rename is what makes it exist. Nothing in it is
used before its checksums and its full key agree; one that fails is removed and built again. A hit
takes no lock and needs no right to write. Links are read through, but removed as links.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import cache_entry, cache_lock
from .cache_entry import CacheEntryInfo, CacheProblem, Defect
from .digest import CacheKey
from .errors import CacheError
from .plan import KernelPlan
from .problem import Problem
from .program import Binary

__all__ = ["Cache", "CacheEntryInfo", "CacheProblem", "Entry", "jit_disabled"]

log = logging.getLogger("attngen")

TEMPORARY = ".tmp-"
STALE_SECONDS = 3600.0  # an entry is written in milliseconds: whoever left this is dead
_unwritable: set[Path] = set()


@dataclass(frozen=True)
class Entry:
    """A launch program and its cubin; `hit`: the cache held it.

    `path` is the entry's directory, None where the kernel could not be stored.
    """

    binary: Binary
    cubin: bytes
    hit: bool
    path: Path | None


def jit_disabled() -> bool:
    """Whether ATTNGEN_DISABLE_JIT forbids compiling."""
    return os.environ.get("ATTNGEN_DISABLE_JIT", "0") not in ("", "0")


class Cache:
    """The kernels under one directory, which need not exist, nor be writable."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._entries = self.root / "entries"
        self._locks = self.root / "locks"

    @classmethod
    def default(cls) -> Cache:
        """ATTNGEN_CACHE_DIR, else $XDG_CACHE_HOME/attngen, else ~/.cache/attngen.

        Raises: CacheError where none of them names a directory.
        """
        if own := os.environ.get("ATTNGEN_CACHE_DIR"):
            return cls(os.path.expanduser(own))
        shared = os.environ.get("XDG_CACHE_HOME", "")
        if os.path.isabs(shared):  # its specification has relative paths ignored
            return cls(Path(shared) / "attngen")
        try:
            return cls(Path.home() / ".cache" / "attngen")
        except RuntimeError as error:
            raise CacheError(f"no place for the cache: {error}; set ATTNGEN_CACHE_DIR") from error

    def get(self, key: CacheKey) -> Entry | None:
        """The entry, or None. A defective one is removed where that is possible.

        Where no compiler is installed, or ATTNGEN_DISABLE_JIT is set, an entry of any toolchain
        serves: the installed one's before the others, the newest first.
        """
        entry, defects = self._find(key)
        if not defects:
            return entry
        with self._lock(key):  # it may just be in replacement: look again when nobody writes
            return self._find_or_discard(key)

    def put(self, key: CacheKey, binary: Binary, cubin: bytes) -> Entry:
        """Stores a kernel, in place of what was there.

        Where that fails (no right to write, disk full) the entry is returned all the same,
        without a path; the log has one warning for each such cache and process.
        """
        path = None
        try:
            path = self._publish(key, binary, cubin)
        except OSError as error:
            level = logging.DEBUG if self.root in _unwritable else logging.WARNING
            _unwritable.add(self.root)
            log.log(level, "%s: kernels cannot be stored and compile anew in each process: %s",
                    self.root, error)  # fmt: skip
        return Entry(binary, cubin, False, path)

    def get_or_build(self, key: CacheKey, compile_now: Callable[[], tuple[Binary, bytes]]) -> Entry:
        """The entry, or what `compile_now` makes, stored: once, however many ask at a time.

        Raises: CacheError on a miss where ATTNGEN_DISABLE_JIT is set; what `compile_now` raises.
        """
        if entry := self.get(key):
            return entry
        if jit_disabled():
            raise CacheError(self._why_missing(key))
        with self._lock(key):
            if entry := self._find_or_discard(key):
                return entry
            return self.put(key, *compile_now())

    def entries(self) -> list[CacheEntryInfo]:
        """Every entry, the oldest first; what is in them is not checked (`verify` does)."""
        infos = [cache_entry.describe(path) for path in self._entry_paths()]
        return sorted(infos, key=lambda info: (info.created, info.path))

    def verify(
        self, source_sha256: Callable[[Problem, KernelPlan], str] | None = None
    ) -> list[CacheProblem]:
        """What is wrong with the entries and beside them; nothing is removed.

        source_sha256: renders a kernel anew and returns its source's digest; asked for the
        entries made from the templates, headers and generator as they are now.
        """
        problems = []
        for path in self._scan():
            try:
                if not path.name.startswith(TEMPORARY):
                    cache_entry.check(path, source_sha256)
                elif _is_stale(path):
                    raise Defect("left aside by a process that died: prune removes it")
            except FileNotFoundError:
                continue  # removed meanwhile
            except Defect as defect:
                problems.append(CacheProblem(path, str(defect)))
        return problems

    def prune(
        self, max_bytes: int | None = None, max_age_seconds: float | None = None
    ) -> list[CacheEntryInfo]:
        """Removes entries older than the age, then the oldest until the rest fits the size.

        Also removes what processes that died left behind. Returns the removed entries.
        """
        infos, removed = self.entries(), []
        excess = 0 if max_bytes is None else sum(info.bytes for info in infos) - max_bytes
        limit = -float("inf") if max_age_seconds is None else time.time() - max_age_seconds
        for info in infos:
            if (info.created < limit or excess > 0) and self._discard(info.path):
                excess -= info.bytes
                removed.append(info)
        self._sweep()
        cache_lock.sweep(self._locks)
        return removed

    def clear(self) -> int:
        """Removes every entry and whatever lies aside; returns the number of entries removed."""
        removed = sum(self._discard(path) for path in self._entry_paths())
        self._sweep(everything=True)
        cache_lock.sweep(self._locks)
        return removed

    def _scan(self) -> list[Path]:
        try:
            return sorted(self._entries.iterdir())
        except OSError:
            return []

    def _entry_paths(self) -> list[Path]:
        return [path for path in self._scan() if cache_entry.is_entry_name(path.name)]

    def _lock(self, key: CacheKey) -> contextlib.AbstractContextManager[None]:
        return cache_lock.hold(self._locks / key.digest, key.label)

    def _candidates(self, key: CacheKey) -> list[Path]:
        """Where the kernel may lie, the preferred place first."""
        exact = []
        if key.toolchain is not None:
            exact = [self._entries / cache_entry.entry_name(key.digest, key.toolchain)]
            if not jit_disabled():
                return exact
        any_toolchain = [p for p in self._entry_paths() if p.name.startswith(f"{key.digest}-")]
        any_toolchain.sort(key=lambda path: cache_entry.newness(path.name), reverse=True)
        return list(dict.fromkeys(exact + any_toolchain))

    def _find(self, key: CacheKey) -> tuple[Entry | None, dict[Path, Defect]]:
        """The first sound entry, or None; and what is wrong with those before it."""
        defects: dict[Path, Defect] = {}
        for path in self._candidates(key):
            try:
                stored = cache_entry.read(path)
                if stored.key != key.material:
                    raise Defect("it answers to another key")
            except FileNotFoundError:
                continue
            except Defect as defect:
                defects[path] = defect
                continue
            log.debug("%s: found in %s", key.label, path)
            return Entry(stored.binary, stored.cubin, True, path), defects
        return None, defects

    def _find_or_discard(self, key: CacheKey) -> Entry | None:
        """As `_find`, under the lock: defective entries go, for nobody is writing them."""
        entry, defects = self._find(key)
        for path, defect in defects.items():
            log.warning("%s: defective cache entry %s: %s", key.label, path, defect)
            if defect.removable:
                self._discard(path)
        return entry

    def _why_missing(self, key: CacheKey) -> list[str]:
        arch = json.loads(key.material)["arch"]
        toolchain = key.toolchain or "any"
        here = shlex.join(["env", "-u", "ATTNGEN_DISABLE_JIT", f"ATTNGEN_CACHE_DIR={self.root}"])
        return [
            f"{key.label} for {arch} is not in the cache, and ATTNGEN_DISABLE_JIT=1 forbids "
            "compiling it",
            f"missing: {self._entries / cache_entry.entry_name(key.digest, toolchain)}",
            "build it with the same attngen where attngen[compile] is installed: "
            f"`attngen build SPEC.toml` with its spec, or exactly: {here} {key.command}",
        ]

    def _aside(self) -> Path:
        return self._entries / f"{TEMPORARY}{uuid.uuid4().hex}"

    def _publish(self, key: CacheKey, binary: Binary, cubin: bytes) -> Path:
        """The path of the entry, whole and synced. Raises: OSError."""
        # Without the package's metadata (a system-wide toolkit) NVRTC itself has said what it is.
        toolchain = key.toolchain or binary.toolchain.rpartition(" ")[2]
        target = self._entries / cache_entry.entry_name(key.digest, toolchain)
        self._entries.mkdir(parents=True, exist_ok=True)
        self._sweep()
        staging = self._aside()
        try:
            cache_entry.write(staging, key, toolchain, binary, cubin)
            try:
                os.rename(staging, target)
            except OSError:
                if not self._discard(target):
                    raise
                os.rename(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        cache_entry.sync_directory(self._entries)
        log.info("%s: stored in %s", key.label, target)
        return target

    def _discard(self, path: Path) -> bool:
        """Removes an entry, in one step for its readers; False where it could not be."""
        aside = self._aside()
        try:
            os.rename(path, aside)
        except OSError as error:
            log.debug("%s: cannot be removed: %s", path, error)
            return False
        cache_entry.remove(aside)
        return True

    def _sweep(self, everything: bool = False) -> None:
        """Removes what lies aside: left by dead processes, or all of it."""
        for path in self._scan():
            if path.name.startswith(TEMPORARY) and (everything or _is_stale(path)):
                cache_entry.remove(path)


def _is_stale(path: Path) -> bool:
    return time.time() - cache_entry.modified(path) > STALE_SECONDS
