"""Bundle: the kernels of many specs in one file, checked as a whole before any of it is used.

A zip archive of `manifest.json` and `cubins/<sha256>.cubin`. Members are stored, sorted and without
dates, so equal contents give equal bytes; the archive's comment is the sha256 of all bytes before
it, so no flipped bit goes unseen. Nothing is unpacked: members are read by their place in the file.

The manifest has one program for each problem and architecture: the titles of the specs that asked
for it and, of each kernel in the order of launch, its launch program, its plan, the toolchain and
the digest under which it was built. A call finds its kernels by problem and architecture alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BundleError
from .problem import Problem
from .program import SCHEMA_VERSION, Binary
from .values import from_data, to_data, to_json

SUFFIX = ".attn"
FORMAT = 1  # of the manifest
MANIFEST = "manifest.json"
_DATE = (1980, 1, 1, 0, 0, 0)
_MARK = b"sha256:"
_DIGEST_BYTES = 64
_HEADER_BYTES = 30  # of a member, before its name
_MEMBER = re.compile(r"cubins/([0-9a-f]{64})\.cubin")


@dataclass(frozen=True)
class BundledKernel:
    """One kernel: its launch program, the plan behind it as data, and the digest of its build."""

    binary: Binary
    plan: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class Program:
    """All kernels of one problem on one architecture, in the order of launch, with their cubins."""

    problem: Problem
    arch: str
    titles: tuple[str, ...]
    kernels: tuple[BundledKernel, ...]
    cubins: tuple[bytes, ...]

    @property
    def key(self) -> tuple[Problem, str]:
        return self.problem, self.arch

    @property
    def identity(self) -> tuple[str, ...]:
        """What two programs of one problem differ in: their cubins' digests."""
        return tuple(kernel.binary.cubin_sha256 for kernel in self.kernels)


def pack(programs: Iterable[Program]) -> bytes:
    """The bundle of these programs; their order does not count.

    Raises: BundleError where two are for one problem and architecture.
    """
    ordered = sorted(programs, key=lambda each: (each.arch, to_json(each.problem)))
    if repeated := [b for a, b in zip(ordered, ordered[1:], strict=False) if a.key == b.key]:
        raise BundleError([f"{_name(each)} is there twice" for each in repeated])
    members = {
        f"cubins/{kernel.binary.cubin_sha256}.cubin": cubin
        for program in ordered
        for kernel, cubin in zip(program.kernels, program.cubins, strict=True)
    }
    manifest = {"format": FORMAT, "schema": SCHEMA_VERSION, "programs": [*map(_record, ordered)]}
    members[MANIFEST] = to_json(manifest, indent=1).encode() + b"\n"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for name in sorted(members):
            file.writestr(_member(name), members[name])
        file.comment = _MARK + b"0" * _DIGEST_BYTES
    covered = archive.getvalue()[:-_DIGEST_BYTES]
    return covered + hashlib.sha256(covered).hexdigest().encode()


def write(path: Path, data: bytes) -> None:
    """Puts a bundle in place in one step. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


class Bundle:
    """A bundle on disk whose bytes were checked when it was opened.

    sha256: of the whole, hex. problems: what it has kernels for, with the titles of the specs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises: BundleError where there is no bundle, or not as it was made."""
        self.path = Path(path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise BundleError(f"{self.path}: {error.strerror}") from error
        self.sha256 = _check_digest(self.path, data)
        try:
            self._places, manifest = _read_members(data)
            records = _records(manifest)
            self._records = {(from_data(Problem, each["problem"]), str(each["arch"])): each
                             for each in records}  # fmt: skip
            self.problems = {key: tuple(each["titles"]) for key, each in self._records.items()}
        except BundleError as error:
            raise BundleError(f"{self.path}: {error}") from error
        except Exception as error:  # whatever a crafted archive makes the readers trip over
            raise BundleError(f"{self.path}: not a bundle: {error!r}") from error

    def program(self, problem: Problem, arch: str) -> Program | None:
        """The kernels of a problem; None where the bundle has none.

        Raises: BundleError where the file is no longer what was opened.
        """
        record = self._records.get((problem, arch))
        if record is None:
            return None
        try:
            kernels = tuple(from_data(BundledKernel, each) for each in record["kernels"])
        except (ValueError, TypeError) as error:
            raise BundleError(f"{self.path}: {problem.label}: {error}") from error
        if any(each.binary.problem != problem or each.binary.arch != arch for each in kernels):
            raise BundleError(f"{self.path}: {problem.label}: a kernel of another problem")
        cubins = tuple(self._cubin(each.binary) for each in kernels)
        return Program(problem, arch, self.problems[problem, arch], kernels, cubins)

    def programs(self) -> list[Program]:
        """All of them. Raises: as `program`."""
        found = [self.program(*key) for key in self._records]
        return [program for program in found if program is not None]

    def _cubin(self, binary: Binary) -> bytes:
        place = self._places.get(binary.cubin_sha256)
        if place is None:
            raise BundleError(f"{self.path}: {binary.kernel.entry} has no cubin")
        offset, size = place
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                cubin = file.read(size)
        except OSError as error:
            raise BundleError(f"{self.path}: {error.strerror}") from error
        if hashlib.sha256(cubin).hexdigest() != binary.cubin_sha256:
            raise BundleError(f"{self.path}: has changed since it was opened")
        return cubin


def merge(bundles: Sequence[Bundle]) -> bytes:
    """One bundle of all their programs; equal ones become one, with the titles of all.

    Raises: BundleError with every problem for which they have different kernels.
    """
    found: dict[tuple[Problem, str], Program] = {}
    origin: dict[tuple[Problem, str], Path] = {}
    conflicts = []
    for bundle in bundles:
        for program in bundle.programs():
            known = found.get(program.key)
            if known is not None and known.identity != program.identity:
                conflicts.append(
                    f"{_name(program)}: {bundle.path} and {origin[program.key]} have different "
                    "kernels; build both with one attngen"
                )
            titles = tuple(sorted({*program.titles, *(known.titles if known else ())}))
            found[program.key] = dataclasses.replace(program, titles=titles)
            origin.setdefault(program.key, bundle.path)
    if conflicts:
        raise BundleError(conflicts)
    return pack(found.values())


def _name(program: Program) -> str:
    return f"{program.problem.label} ({program.problem.direction}, {program.arch})"


def _record(program: Program) -> dict[str, Any]:
    return {
        "arch": program.arch,
        "problem": to_data(program.problem),
        "titles": sorted(program.titles),
        "kernels": [to_data(kernel) for kernel in program.kernels],
    }


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # Unix, wherever it is made
    info.external_attr = 0o644 << 16
    return info


def _check_digest(path: Path, data: bytes) -> str:
    """The sha256 of all bytes but their own digest."""
    covered, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not covered.endswith(_MARK):
        raise BundleError(f"{path}: not a bundle, or cut short")
    found = hashlib.sha256(covered).hexdigest()
    if found.encode() != digest:
        raise BundleError(f"{path}: damaged: its sha256 is {found[:12]}…, not {digest[:12]!r}…")
    return found


def _read_members(data: bytes) -> tuple[dict[str, tuple[int, int]], Any]:
    """Where each cubin lies (offset, bytes), and the manifest."""
    places = {}
    manifest = None
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in file.infolist():
            match = _MEMBER.fullmatch(info.filename)
            if match is None and info.filename != MANIFEST:
                raise BundleError(f"{info.filename!r} has no place in a bundle")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise BundleError(f"{info.filename}: members of a bundle are not compressed")
            start = info.header_offset + _HEADER_BYTES + len(info.filename.encode())
            if start + info.file_size > len(data):
                raise BundleError(f"{info.filename}: reaches beyond the end")
            if match is None:
                manifest = json.loads(data[start : start + info.file_size])
            else:
                places[match[1]] = start, info.file_size
    return places, manifest


def _records(manifest: Any) -> list[dict[str, Any]]:
    """The programs of a manifest of this version."""
    if not isinstance(manifest, dict):
        raise BundleError(f"{MANIFEST} is missing or no object")
    for name, ours in (("format", FORMAT), ("schema", SCHEMA_VERSION)):
        theirs = manifest.get(name)
        if theirs != ours:
            newer = isinstance(theirs, int) and theirs > ours
            advice = "update attngen" if newer else "build it anew"
            raise BundleError(f"{name} {theirs!r}, this attngen reads {ours}: {advice}")
    records: list[dict[str, Any]] = manifest["programs"]
    return records
