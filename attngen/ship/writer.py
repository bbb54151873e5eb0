"""Bundle writing: programs into a file whose bytes they and zlib decide; bundles into one.

Cubins are asked for one at a time while the file is written, so that memory holds one of them.
Those of other bundles are deflated anew: what a zlib elsewhere made of them decides nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import BundleError
from ..io.files import replacing
from ..io.values import to_json
from ..runtime.program import SCHEMA_VERSION, Binary
from ..spec.problem import Variant
from .bundle import (
    DIGEST_BYTES,
    FORMAT,
    MANIFEST,
    MARK,
    Bundle,
    Program,
    is_bundle,
    member_of,
    name_of,
)

_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that zip knows
_LEVEL = 6  # of zlib: the highest makes cubins 2 % smaller in ten times as long
_CHUNK = 1 << 20


def write(path: Path, programs: Iterable[Program], cubin_of: Callable[[Binary], bytes]) -> None:
    """Puts the bundle of these programs in place, in one step; their order does not count.

    Raises: BundleError where two are for one problem and architecture, or a cubin is not the one
    that its launch program describes; what `cubin_of` raises; OSError, also where another
    kind of file is at `path`.
    """
    ordered = sorted(programs, key=lambda each: (each.arch, to_json(each.problem)))
    counts = Counter(program.key for program in ordered)
    if repeated := [key for key, count in counts.items() if count > 1]:
        raise BundleError([f"{name_of(key)} is there more than once" for key in repeated])
    sorted_titles = [dataclasses.replace(p, titles=tuple(sorted(p.titles))) for p in ordered]
    manifest = {"format": FORMAT, "schema": SCHEMA_VERSION, "programs": sorted_titles}
    cubins = {binary.cubin_sha256: binary for each in ordered for binary in each.binaries}
    with replacing(path, is_bundle, "bundle") as file:
        try:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
                for sha256 in sorted(cubins):
                    cubin = _checked(cubins[sha256], cubin_of(cubins[sha256]))
                    member = plain_member(member_of(sha256), zipfile.ZIP_DEFLATED)
                    archive.writestr(member, cubin, compresslevel=_LEVEL)
                text = to_json(manifest, indent=1) + "\n"
                archive.writestr(plain_member(MANIFEST), text.encode())
                archive.comment = MARK + b"0" * DIGEST_BYTES
        except zipfile.LargeZipFile as error:
            raise BundleError(f"{path}: a bundle holds 4 GB or 65535 kernels: {error}") from error
        _seal(file)


def merge(path: Path, bundles: Sequence[Bundle]) -> None:
    """Writes one bundle of all their programs; equal ones become one, with the titles of all.

    Raises: BundleError with every problem for which they have different kernels; OSError.
    """
    found: dict[Variant, Program] = {}
    origin: dict[Variant, Bundle] = {}
    home: dict[str, Bundle] = {}
    conflicts = []
    for bundle in bundles:
        for program in bundle.programs():
            known = found.setdefault(program.key, program)
            first = origin.setdefault(program.key, bundle)
            if known.binaries != program.binaries:
                conflicts.append(
                    f"{program.name}: {first.path} and {bundle.path} have different kernels; "
                    "build both with one attngen and compiler"
                )
            titles = tuple({*known.titles, *program.titles})
            found[program.key] = dataclasses.replace(known, titles=titles)
            home |= {binary.cubin_sha256: bundle for binary in program.binaries}
    if conflicts:
        raise BundleError(conflicts)
    write(path, found.values(), lambda binary: home[binary.cubin_sha256].cubin(binary))


def plain_member(name: str, method: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    """Describe a member of an archive alike wherever and whenever the archive is made."""
    info = zipfile.ZipInfo(name, _DATE)
    info.compress_type = method
    info.create_system = 3  # Unix
    info.external_attr = 0o644 << 16
    return info


def _checked(binary: Binary, cubin: bytes) -> bytes:
    if hashlib.sha256(cubin).hexdigest() != binary.cubin_sha256:
        raise BundleError(f"{binary.kernel.entry}: the cubin is not the one described")
    return cubin


def _seal(file: BinaryIO) -> None:
    """Writes the sha256 of all bytes before it over the zeros that end the archive."""
    left = file.seek(-DIGEST_BYTES, 2)
    file.seek(0)
    state = hashlib.sha256()
    while left:
        chunk = file.read(min(left, _CHUNK))
        state.update(chunk)
        left -= len(chunk)
    file.seek(-DIGEST_BYTES, 2)
    file.write(state.hexdigest().encode())
