"""Cache entries: the files of one compiled kernel on disk, how they are written and trusted.

An entry is the directory `<digest>-<toolchain>` with `kernel.cubin`, `metadata.json` (the key in
full, the launch program, the time) and `SHA256SUMS` over both, which `sha256sum -c` reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..io import trust
from ..io.values import from_data, to_data, to_json
from ..kernels.base import KernelPlan
from ..kernels.plan import read_plan
from ..runtime.program import Binary
from ..runtime.program_check import mistakes_of
from ..spec.problem import Problem
from .digest import CacheKey, digest_text, key_digests

FORMAT = 1  # of metadata.json
CUBIN, METADATA, CHECKSUMS = "kernel.cubin", "metadata.json", "SHA256SUMS"
MOST_BYTES = 1 << 24  # of a file: what is longer is none of ours
# Conditions of this process or its rights: the entry cannot be read here, yet may be sound.
_NOT_THE_ENTRY = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Defect(Exception):
    """Why an entry must not be used; `removable` where no other process could use it either."""

    def __init__(self, reason: str, removable: bool = True) -> None:
        super().__init__(reason)
        self.removable = removable


class Distrust(Defect):
    """The entry may be another user's work: it is neither used nor removed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, removable=False)


@dataclass(frozen=True)
class Stored:
    """An entry whose checksums, format and digest agree. `key`: the key's material, canonical."""

    key: str
    binary: Binary
    cubin: bytes


@dataclass(frozen=True)
class CacheEntryInfo:
    """One entry on disk: its size in bytes, its creation in unix seconds.

    Where the metadata does not parse: label `(defective)`, no arch, the directory's own time.
    """

    digest: str
    label: str
    arch: str
    toolchain: str
    bytes: int
    created: float
    path: Path


@dataclass(frozen=True)
class CacheProblem:
    """A fault of one thing in the cache."""

    path: Path
    reason: str


def entry_name(digest: str, toolchain: str) -> str:
    """The directory's name; the toolchain's version follows the first hyphen."""
    return f"{digest}-{re.sub(r'[^A-Za-z0-9.+_]', '_', toolchain)}"


def is_entry_name(name: str) -> bool:
    """Whether the cache gave that name to an entry."""
    return re.fullmatch(r"[0-9a-f]{64}-[A-Za-z0-9.+_]+", name) is not None


def newness(name: str) -> tuple[list[int], str]:
    """Sorts entry names by the version of their toolchain: 12.9 before 13.0.88."""
    version = name.partition("-")[2]
    return [int(number) for number in re.findall(r"\d+", version)], version


def write(path: Path, key: CacheKey, toolchain: str, binary: Binary, cubin: bytes) -> None:
    """Makes the directory `path` with the files of an entry, all of it on the disk on return.

    Raises: OSError.
    """
    metadata = {
        "format": FORMAT,
        "label": key.label,
        "toolchain": toolchain,
        "created": time.time(),
        "key": json.loads(key.material),
        "binary": to_data(binary),
    }
    text = json.dumps(metadata, sort_keys=True, indent=1).encode() + b"\n"
    os.mkdir(path, 0o755)  # what its group may write to is not trusted, whatever the umask
    for name, data in ((CUBIN, cubin), (METADATA, text), (CHECKSUMS, _checksums(cubin, text))):
        descriptor = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(path)


def sync_directory(path: Path) -> None:
    """Brings the names in a directory to the disk, where its file system can do that: what is
    lost without it the checksums find."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path) -> Stored:
    """The entry at `path`, checked.

    Raises: FileNotFoundError where nothing is there; Defect; Distrust where another user may have
    written it.
    """
    with contextlib.suppress(OSError):  # which reading its files says better
        _require_trust(path.name, os.stat(path))
    cubin, text, sums = (_read_file(path, name) for name in (CUBIN, METADATA, CHECKSUMS))
    if sums != _checksums(cubin, text):
        raise Defect(f"{CHECKSUMS} does not fit the files")
    try:
        metadata = json.loads(text)
        if metadata["format"] != FORMAT:
            raise Defect(f"format {metadata['format']!r}, not {FORMAT}")
        key = to_json(metadata["key"])
        binary = from_data(Binary, metadata["binary"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Defect(f"{METADATA}: {error!r}") from error
    if mistakes := mistakes_of(binary):
        raise Defect(f"{METADATA}: {'; '.join(mistakes)}")
    if path.name.partition("-")[0] != digest_text(key):
        raise Defect("its key is not the one that its name is the digest of")
    if hashlib.sha256(cubin).hexdigest() != binary.cubin_sha256:
        raise Defect("its launch program belongs to another cubin")
    return Stored(key, binary, cubin)


def check(path: Path, source_sha256: Callable[[Problem, KernelPlan], str] | None = None) -> None:
    """Passes where the entry is sound and, if asked, its source still renders to the same text.

    Raises: Defect; FileNotFoundError where nothing is there.
    """
    if not is_entry_name(path.name):
        raise Defect("not an entry of the cache")
    stored = read(path)
    key = json.loads(stored.key)
    if source_sha256 is None:
        return
    problem = from_data(Problem, key["problem"])
    if any(key.get(name) != digest for name, digest in key_digests(problem).items()):
        return
    source = source_sha256(problem, read_plan(key["plan"]))
    if source != stored.binary.source_sha256:
        raise Defect("its source is rendered differently now")


def describe(path: Path) -> CacheEntryInfo:
    """The line of a listing about the entry at `path`; nothing is checked."""
    digest, _, toolchain = path.name.partition("-")
    try:
        metadata = json.loads(_read_file(path, METADATA))
        label, created = str(metadata["label"]), float(metadata["created"])
        arch = str(metadata["binary"]["arch"])
    except (Defect, OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
        label, arch, created = "(defective)", "", modified(path)
    return CacheEntryInfo(digest, label, arch, toolchain, _size(path), created, path)


def modified(path: Path) -> float:
    """Unix seconds of the last change; now, where it has just gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return time.time()


def remove(path: Path) -> None:
    """Removes a directory, a file, or a link (not what it points to), as far as possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _size(path: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0


def _checksums(cubin: bytes, metadata: bytes) -> bytes:
    digests = {name: hashlib.sha256(data) for name, data in ((CUBIN, cubin), (METADATA, metadata))}
    return "".join(f"{each.hexdigest()}  {name}\n" for name, each in digests.items()).encode()


def _require_trust(name: str, status: os.stat_result) -> None:
    if reason := trust.distrust(status):
        raise Distrust(f"{name} {reason}")


def _read_file(entry: Path, name: str) -> bytes:
    """All of a regular file; a link to one is read through.

    Raises: FileNotFoundError where there is no entry; Defect where it lacks the file.
    """
    try:
        # Never blocks: a pipe in the file's place must not hang the reader.
        descriptor = os.open(entry / name, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Defect(f"{name}: not a regular file")
            _require_trust(name, status)
            if status.st_size > MOST_BYTES:
                raise Defect(f"{name}: {status.st_size} bytes; at most {MOST_BYTES}")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(status.st_size + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not os.path.lexists(entry):
            raise FileNotFoundError(entry) from error
        raise Defect(f"{name}: {error.strerror}", error.errno not in _NOT_THE_ENTRY) from error
