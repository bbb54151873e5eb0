"""Bundle: the kernels of many specs in one file, checked as a whole before any of it is used.

A zip archive of `manifest.json`, as it is, and `cubins/<sha256>.cubin`, deflated. Members are
sorted and without dates, so that one zlib makes equal bytes of equal contents; the archive's
comment is the sha256 of all bytes before it, so no flipped bit goes unseen. No member becomes a
file: cubins are read by their place, and inflated, when they are asked for.

The manifest has one program for each problem and architecture. A call finds its kernels by these
two alone; under which digest they were built is recorded, not needed. The sha256 shows damage, not
who made a bundle: like any library, one is loaded from whom one trusts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import BundleError
from ..io.files import open_regular
from ..io.text import printable
from ..io.values import from_data
from ..runtime.program import SCHEMA_VERSION, Binary
from ..runtime.program_check import mistakes_of
from ..spec.problem import Problem, Variant

SUFFIX = ".attn"
FORMAT = 2  # of the archive and its manifest
MANIFEST = "manifest.json"
MARK = b"sha256:"
DIGEST_BYTES = 64
_MEMBER = re.compile(r"cubins/([0-9a-f]{64})\.cubin")
_FIRST_NAME = 30  # where the name of an archive's first member begins
_CHUNK = 1 << 20
_MOST_BYTES = 1 << 24  # that a cubin may say it has: what claims more is none of ours
_MOST_MANIFEST_BYTES = 1 << 29  # some 8 kB a kernel, and at most 65535 of them


@dataclass(frozen=True)
class BundledKernel:
    """One kernel: its launch program, the plan behind it as data, and the digest of its build."""

    binary: Binary
    plan: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class Program:
    """All kernels of one problem on one architecture, in the order of launch.

    titles: of the specs that asked for it.
    """

    problem: Problem
    arch: str
    titles: tuple[str, ...]
    kernels: tuple[BundledKernel, ...]

    @property
    def key(self) -> Variant:
        return self.problem, self.arch

    @property
    def name(self) -> str:
        return name_of(self.key)

    @property
    def binaries(self) -> tuple[Binary, ...]:
        """The binaries of its kernels, in which two programs of one problem differ."""
        return tuple(kernel.binary for kernel in self.kernels)


@dataclass(frozen=True)
class _Record:
    """A program as the manifest has it, its kernels not looked at before they are asked for."""

    problem: Problem
    arch: str
    titles: tuple[str, ...]
    kernels: tuple[Any, ...]


@dataclass(frozen=True)
class _Place:
    """Where a member's bytes lie in the file, and how many it has when it is inflated."""

    offset: int
    stored_bytes: int
    bytes: int


def is_bundle(path: Path) -> bool:
    """Whether a file was written as a bundle, of this version or another, damaged or not: its
    first member is a cubin, or it ends with the mark of a digest."""
    with open_regular(path) as file:
        name = file.read(_FIRST_NAME + 77)[_FIRST_NAME:]
        end = file.seek(0, os.SEEK_END) - DIGEST_BYTES - len(MARK)
        file.seek(max(0, end))
        marked = file.read(len(MARK)) == MARK
    return marked or re.match(rb"cubins/|.{7}[0-9a-f]{64}\.cubin", name, re.DOTALL) is not None


def name_of(variant: Variant) -> str:
    """Its label, direction and architecture: `causal_d128_bf16 (fwd, …)`."""
    problem, arch = variant
    return printable(f"{problem.label} ({problem.direction}, {arch})")


def member_of(cubin_sha256: str) -> str:
    """The name under which a bundle has a cubin."""
    return f"cubins/{cubin_sha256}.cubin"


class Bundle:
    """A bundle on disk whose bytes were checked when it was opened.

    It stays open: whoever puts another file in its place leaves this one as it is. bytes: of the
    file. sha256: of all but the last 64 of them, which have it, hex. problems: what it has kernels
    for, with the titles of the specs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises: BundleError where there is no bundle, or not as it was made."""
        self.path = Path(path)
        self._shown = printable(str(path))  # in messages
        try:
            with open_regular(self.path) as file:
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)
                self.bytes = os.fstat(self._descriptor).st_size
                self.sha256 = _check_digest(file, self.bytes)
                self._places, self._records = _read_members(file)
        except BundleError as error:
            raise BundleError([f"{self._shown}: {reason}" for reason in error.reasons]) from error
        except OSError as error:
            raise BundleError(f"{self._shown}: {error.strerror or error}") from error
        except Exception as error:  # whatever a crafted archive makes the readers trip over
            raise BundleError(f"{self._shown}: not a bundle: {error!r}") from error
        self.problems = {key: record.titles for key, record in self._records.items()}

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, variants={len(self.problems)}, sha256={self.sha256!r})"

    def program(self, problem: Problem, arch: str) -> Program | None:
        """The kernels of a problem; None where the bundle has none.

        Raises: BundleError where what it has is not for this problem.
        """
        record = self._records.get((problem, arch))
        if record is None:
            return None
        where = f"{self._shown}: {name_of((problem, arch))}"
        try:
            kernels = tuple(from_data(BundledKernel, each) for each in record.kernels)
        except (ValueError, TypeError) as error:
            raise BundleError(f"{where}: {error}") from error
        if not kernels:
            raise BundleError(f"{where}: has no kernel")
        if any((k.binary.problem, k.binary.arch) != (problem, arch) for k in kernels):
            raise BundleError(f"{where}: a kernel of another problem or architecture")
        mistakes = [
            f"{k.binary.kernel.entry[:80]}: {mistake}"
            for k in kernels
            for mistake in mistakes_of(k.binary)
        ]
        absent = [k.binary for k in kernels if k.binary.cubin_sha256 not in self._places]
        mistakes += [f"{each.kernel.entry[:80]} has no cubin" for each in absent]
        if mistakes:
            raise BundleError([printable(f"{where}: {mistake}") for mistake in mistakes])
        return Program(problem, arch, record.titles, kernels)

    def programs(self) -> Iterator[Program]:
        """All of them. Raises: as `program`."""
        for key in self._records:
            program = self.program(*key)
            assert program is not None
            yield program

    def differs(self, other: Bundle, variant: Variant) -> bool:
        """Whether two bundles that both have kernels of a problem have different ones.

        Raises: as `program`.
        """
        if self._records[variant].kernels == other._records[variant].kernels:
            return False  # to the last word of their manifests: nothing needs to be parsed
        ours, theirs = self.program(*variant), other.program(*variant)
        assert ours is not None and theirs is not None
        return ours.binaries != theirs.binaries

    def cubin(self, binary: Binary) -> bytes:
        """Raises: BundleError where it is not the one that the manifest names, as when the file was
        written to since it was opened."""
        place = self._places[binary.cubin_sha256]
        try:
            cubin = _inflate(self._read(place.offset, place.stored_bytes), place.bytes)
        except OSError as error:
            raise BundleError(f"{self._shown}: {error.strerror}") from error
        if cubin is None or hashlib.sha256(cubin).hexdigest() != binary.cubin_sha256:
            where = f"{self._shown}: {member_of(binary.cubin_sha256)}"
            raise BundleError(f"{where} is damaged, or has changed since it was opened")
        return cubin

    def stored_bytes(self, binary: Binary) -> int:
        """Count the bytes that its cubin takes in the file."""
        return self._places[binary.cubin_sha256].stored_bytes

    def data(self) -> bytes:
        """The whole file. Raises: BundleError where it was written to since it was opened."""
        data = self._read(0, self.bytes)
        if hashlib.sha256(data[:-DIGEST_BYTES]).hexdigest() != self.sha256:
            raise BundleError(f"{self._shown}: has changed since it was opened")
        return data

    def verify(self) -> list[Program]:
        """Every program, each of its cubins read and checked.

        Raises: BundleError, also where a cubin is no program's.
        """
        programs = list(self.programs())
        used = {binary.cubin_sha256: binary for each in programs for binary in each.binaries}
        for binary in used.values():
            self.cubin(binary)
        if idle := self._places.keys() - used.keys():
            raise BundleError(f"{self._shown}: no program uses {', '.join(map(member_of, idle))}")
        return programs

    def _read(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)


def _check_digest(file: BinaryIO, size: int) -> str:
    """The sha256 of all bytes but their own digest, which ends the file."""
    left = size - DIGEST_BYTES
    file.seek(max(0, left - len(MARK)))
    if file.read(len(MARK)) != MARK:
        raise BundleError("not a bundle, or cut short")
    digest, state = file.read(), hashlib.sha256()
    file.seek(0)
    while left > 0 and (chunk := file.read(min(left, _CHUNK))):
        state.update(chunk)
        left -= len(chunk)
    found = state.hexdigest()
    if found.encode() != digest:
        said = repr(digest[:12])[2:-1]  # whatever bytes they are
        raise BundleError(f"damaged: its sha256 is {found[:12]}…, not {said}…")
    return found


def _read_members(file: BinaryIO) -> tuple[dict[str, _Place], dict[Variant, _Record]]:
    """Where each cubin lies, and the programs.

    Members must fill the archive from its first byte to its directory, each behind the very header
    that the directory describes: no bytes are hidden, shared, or anywhere else than they seem.
    """
    position = 0
    with zipfile.ZipFile(file) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        counts = Counter(info.filename for info in infos)
        if repeated := sorted(name for name, count in counts.items() if count > 1):
            raise BundleError(f"{repeated} are there more than once")
        records = _read_records(_read_manifest(archive, file))
        places: dict[str, _Place] = {}
        for info in infos:
            match = _MEMBER.fullmatch(info.filename)
            if match is None and info.filename != MANIFEST:
                raise BundleError(f"{info.filename!r} has no place in a bundle")
            if match and (info.compress_type != zipfile.ZIP_DEFLATED or info.flag_bits):
                raise BundleError(f"{info.filename}: cubins in a bundle are deflated")
            if match and info.file_size > _MOST_BYTES:
                raise BundleError(f"{info.filename}: {info.file_size} bytes are no kernel")
            header = info.FileHeader(zip64=False)
            file.seek(position)
            if info.header_offset != position or file.read(len(header)) != header or info.extra:
                raise BundleError(f"{info.filename}: is not where the directory says")
            position += len(header)
            if match:
                places[match[1]] = _Place(position, info.compress_size, info.file_size)
            position += info.compress_size
        if position != archive.start_dir or len(archive.comment) != len(MARK) + DIGEST_BYTES:
            raise BundleError("has bytes that belong to no member")
    return places, records


def _read_manifest(archive: zipfile.ZipFile, file: BinaryIO) -> Any:
    """Read before members are looked at: it says whether this attngen knows their form."""
    try:
        info = archive.getinfo(MANIFEST)
    except KeyError:
        raise BundleError(f"{MANIFEST} is missing") from None
    plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits
    if not plain or info.file_size != info.compress_size:
        raise BundleError(f"{MANIFEST}: is stored as it is in a bundle")
    if info.file_size > _MOST_MANIFEST_BYTES:
        raise BundleError(f"{MANIFEST}: {info.file_size} bytes; at most {_MOST_MANIFEST_BYTES}")
    start = info.header_offset + len(info.FileHeader(zip64=False))
    if start + info.file_size > archive.start_dir:
        raise BundleError(f"{MANIFEST}: is not where the directory says")
    file.seek(start)
    return json.loads(file.read(info.file_size))


def _inflate(data: bytes, size: int) -> bytes | None:
    """Unpack a member of `size` bytes; None where it holds another number of them.

    At most one byte more than `size` is unpacked to see that.
    """
    stream = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        plain = stream.decompress(data, size + 1)
    except zlib.error:
        return None
    return plain if len(plain) == size and stream.eof and not stream.unused_data else None


def _read_records(manifest: Any) -> dict[Variant, _Record]:
    """The programs of a manifest of this version."""
    if not isinstance(manifest, dict):
        raise BundleError(f"{MANIFEST} is no object")
    for name, ours in (("format", FORMAT), ("schema", SCHEMA_VERSION)):
        theirs = manifest.get(name)
        if theirs != ours:
            newer = isinstance(theirs, int) and theirs > ours
            advice = "update attngen" if newer else "build it anew"
            raise BundleError(f"{name} {theirs!r}, this attngen reads {ours}: {advice}")
    records = [from_data(_Record, each) for each in manifest["programs"]]
    found = {(record.problem, record.arch): record for record in records}
    if len(found) < len(records):
        raise BundleError("several programs are for one problem and architecture")
    return found
