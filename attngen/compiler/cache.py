"""Cache: compiled kernels on disk, shared by threads, processes and machines.

    <root>/entries/<digest>-<toolchain>/    one kernel; its files: compiler/cache_entry.py
    <root>/entries/.tmp-<unique>/           an entry being written, or being removed
    <root>/locks/<digest>                   held across check, compile and publish
    <root>/locks/.tmp-<unique>              held while the entry of this name is written

An entry is written aside, synced, and renamed: the rename is what makes it exist. Nothing in it is
used before its checksums and its full key agree; one that fails is removed and built again. A hit
takes no lock and needs no right to write. What may be another user's work is neither used nor
added to (io/trust.py). Links are read through, but removed as links, and nothing is written through
one, except that the root may be one.
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

from ..errors import CacheError
from ..io import file_lock, trust
from ..io.file_lock import FileLock
from ..io.files import make_directory
from ..kernels.base import KernelPlan
from ..runtime.program import Binary
from ..spec.problem import Problem
from . import cache_entry, cache_lock
from .cache_entry import CacheEntryInfo, CacheProblem, Defect, Distrust
from .digest import CacheKey

__all__ = ["Cache", "CacheEntryInfo", "CacheProblem", "Entry", "jit_disabled"]

log = logging.getLogger("attngen")

TEMPORARY = ".tmp-"
REMOVED = ".tmp-removed-"  # to be removed, whoever began with it
UNLOCKED = ".tmp-unlocked-"  # where there are no locks: nobody knows whether its writer lives
STALE_SECONDS = 3600.0  # of what an earlier version wrote without a lock, in milliseconds
_told: set[tuple[Path, str]] = set()


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
        if own := os.path.expanduser(os.environ.get("ATTNGEN_CACHE_DIR", "")):
            if own.startswith("~"):
                raise CacheError(f"ATTNGEN_CACHE_DIR={own}: no such user's home is known")
            return cls(own)
        shared = os.environ.get("XDG_CACHE_HOME", "")
        if os.path.isabs(shared):  # its specification has relative paths ignored
            return cls(Path(shared) / "attngen")
        try:
            return cls(Path.home() / ".cache" / "attngen")
        except RuntimeError as error:
            raise CacheError(
                f"no place for the cache: {str(error).rstrip('.')}; set ATTNGEN_CACHE_DIR"
            ) from error

    def get(self, key: CacheKey) -> Entry | None:
        """The entry, or None. A defective one is removed where that is possible.

        Where no compiler is installed, or ATTNGEN_DISABLE_JIT is set, an entry of any toolchain
        serves: the installed one's before the others, the newest first.
        """
        if self._is_refused():
            return None
        entry, defects = self._find(key)
        if not defects:
            return entry
        with self._lock(key):  # it may just be in replacement: look again when nobody writes
            return self._find_or_discard(key)

    def put(self, key: CacheKey, binary: Binary, cubin: bytes) -> Entry:
        """Stores a kernel, in place of what was there.

        Where that fails (no right to write, disk full), or the cache is not trusted, the entry is
        returned all the same, without a path; the log has one warning for each such cache and
        process.
        """
        path = None
        try:
            if not self._is_refused():
                path = self._publish(key, binary, cubin)
        except OSError as error:
            self._warn_once("stored", "%s: kernels cannot be stored and compile anew in each "
                            "process: %s", self.root, error)  # fmt: skip
        return Entry(binary, cubin, False, path)

    def get_or_build(self, key: CacheKey, compile_now: Callable[[], tuple[Binary, bytes]]) -> Entry:
        """The entry, or what `compile_now` makes, stored: once, however many ask at a time.

        Raises: CacheError on a miss where ATTNGEN_DISABLE_JIT is set; what `compile_now` raises.
        """
        if entry := self.get(key):
            return entry
        if jit_disabled():
            raise CacheError(self._why_missing(key))
        if self._is_refused():
            return Entry(*compile_now(), hit=False, path=None)
        with self._lock(key):
            if entry := self._find_or_discard(key):
                return entry
            return self.put(key, *compile_now())

    def distrust(self) -> str | None:
        """Why no kernel here is used and none is stored: another user may have planted it.

        Raises: CacheError where ATTNGEN_TRUSTED_UIDS is malformed.
        """
        for place in (self.root, self._entries, self._locks):
            with contextlib.suppress(OSError):  # nothing there yet, or nothing to be seen
                # In a place like /tmp others cannot replace what lies in it, such as `entries`.
                if reason := trust.distrust(os.stat(place), sticky=place == self.root):
                    return f"{place} {reason}"
        return None

    def entries(self) -> list[CacheEntryInfo]:
        """Every entry, the oldest first; what is in them is not checked (`verify` does)."""
        infos = [cache_entry.describe(path) for path in self._entry_paths()]
        return sorted(infos, key=lambda info: (info.created, info.path))

    def verify(
        self, source_sha256: Callable[[Problem, KernelPlan], str] | None = None
    ) -> list[CacheProblem]:
        """Whatever is wrong with the entries and beside them; nothing is removed.

        source_sha256: renders a kernel anew and returns its source's digest; asked for the
        entries made from the templates, headers and generator as they are now.
        """
        reason = self.distrust()
        problems = [CacheProblem(self.root, f"not used: {reason}")] if reason else []
        for path in self._scan():
            try:
                if not path.name.startswith(TEMPORARY):
                    cache_entry.check(path, source_sha256)
                elif self._is_left(path) and _is_stale(path):  # else the next build removes it
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
        self._sweep_locks()
        return removed

    def clear(self) -> int:
        """Removes every entry, and what lies aside unless it is being written; returns the number
        of entries removed."""
        removed = sum(self._discard(path) for path in self._entry_paths())
        self._sweep(everything=True)
        self._sweep_locks()
        return removed

    def _scan(self) -> list[Path]:
        try:
            return sorted(self._entries.iterdir())
        except OSError:
            return []

    def _entry_paths(self) -> list[Path]:
        return [path for path in self._scan() if cache_entry.is_entry_name(path.name)]

    def _is_refused(self) -> bool:
        """Whether the cache is not trusted, which the log then says once."""
        if reason := self.distrust():
            self._warn_once("trusted", "%s; kernels of the cache are not used, nor stored there, "
                            "and compile anew in each process", reason)  # fmt: skip
        return reason is not None

    def _warn_once(self, topic: str, text: str, *values: object) -> None:
        level = logging.DEBUG if (self.root, topic) in _told else logging.WARNING
        _told.add((self.root, topic))
        log.log(level, text, *values)

    def _lock(self, key: CacheKey) -> contextlib.AbstractContextManager[None]:
        with contextlib.suppress(OSError):  # which the lock meets again, and then does without
            self._make_root()
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
        """`_find`, under the lock: defective entries go, for nobody is writing them."""
        entry, defects = self._find(key)
        for path, defect in defects.items():
            if isinstance(defect, Distrust):
                self._warn_once(path.name, "%s: not used: %s: %s", key.label, path, defect)
                continue
            log.warning("%s: defective cache entry %s: %s", key.label, path, defect)
            if defect.removable:
                self._discard(path)
        return entry

    def _why_missing(self, key: CacheKey) -> list[str]:
        arch = json.loads(key.material)["arch"]
        toolchain = key.toolchain or "any"
        here = shlex.join(["env", "-u", "ATTNGEN_DISABLE_JIT", f"ATTNGEN_CACHE_DIR={self.root}"])
        distrusted = f" is used, since {reason}" if (reason := self.distrust()) else ""
        return [
            f"{key.label} for {arch} is not in the cache, and ATTNGEN_DISABLE_JIT=1 forbids "
            "compiling it",
            *((f"nothing in {self.root}{distrusted}",) if distrusted else ()),
            f"missing: {self._entries / cache_entry.entry_name(key.digest, toolchain)}",
            "build it with the same attngen where attngen[compile] is installed: "
            f"`attngen build SPEC.toml` with its spec, or exactly: {here} {key.command}",
        ]

    def _make_root(self) -> None:
        if not self.root.is_dir():
            make_directory(self.root)

    def _staging(self) -> tuple[Path, FileLock | None]:
        """Where an entry may be written, and the lock by which others see that its writer lives."""
        unique = uuid.uuid4().hex
        with contextlib.suppress(OSError):  # without locks
            make_directory(self._locks)
            lock = file_lock.try_lock(self._locks / f"{TEMPORARY}{unique}")
            if lock is not None:
                return self._entries / lock.path.name, lock
        return self._entries / f"{UNLOCKED}{unique}", None

    def _publish(self, key: CacheKey, binary: Binary, cubin: bytes) -> Path:
        """The path of the entry, whole and synced. Raises: OSError."""
        # Without the package's metadata (a system-wide toolkit) NVRTC itself has said what it is.
        toolchain = key.toolchain or binary.toolchain.rpartition(" ")[2]
        target = self._entries / cache_entry.entry_name(key.digest, toolchain)
        self._make_root()
        make_directory(self._entries)
        self._sweep()
        staging, lock = self._staging()
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
        finally:
            if lock is not None:
                with lock, contextlib.suppress(OSError):
                    lock.path.unlink()
        cache_entry.sync_directory(self._entries)
        log.info("%s: stored in %s", key.label, target)
        return target

    def _discard(self, path: Path) -> bool:
        """Removes an entry, in one step for its readers; False where it could not be."""
        if self._entries.is_symlink():
            return False
        aside = self._entries / f"{REMOVED}{uuid.uuid4().hex}"
        try:
            os.rename(path, aside)
        except OSError as error:
            log.debug("%s: cannot be removed: %s", path, error)
            return False
        cache_entry.remove(aside)
        return True

    def _sweep(self, everything: bool = False) -> None:
        """Removes what dead processes left aside; everything: also what nobody knows to be left."""
        if self._entries.is_symlink():
            return
        for path in self._scan():
            if path.name.startswith(TEMPORARY) and self._is_left(path, everything):
                cache_entry.remove(path)
        if not self._locks.is_symlink():
            file_lock.sweep(self._locks.glob(f"{TEMPORARY}*"))

    def _sweep_locks(self) -> None:
        if not self._locks.is_symlink():
            cache_lock.sweep(self._locks)

    def _is_left(self, path: Path, everything: bool = False) -> bool:
        """Whether who wrote this aside is dead: its lock is free. everything: also where nobody
        knows, as of what has no lock."""
        if path.name.startswith((REMOVED, UNLOCKED)):
            return everything or path.name.startswith(REMOVED)
        try:
            lock = file_lock.try_lock(self._locks / path.name, create=False)
        except FileNotFoundError:
            return everything or _is_stale(path)
        except OSError:
            return False
        if lock is not None:
            lock.release()
        return lock is not None


def _is_stale(path: Path) -> bool:
    return time.time() - cache_entry.modified(path) > STALE_SECONDS
