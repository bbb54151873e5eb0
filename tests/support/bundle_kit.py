"""Bundles of kernels that were never compiled, and archives that no attngen would write."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from attngen.runtime.program import Binary
from attngen.ship import writer as bundle_write
from attngen.ship.bundle import DIGEST_BYTES, MANIFEST, MARK, Bundle, BundledKernel, Program
from tests.support.cache_kit import ARCH, PROBLEM, make_binary

Edit = Callable[[dict[str, Any]], object]
Members = list[tuple[zipfile.ZipInfo, bytes]]


def cubin_for(tag: str) -> bytes:
    return f"\x7fELF {tag}".encode()


def make_program(
    head_dim: int = 64, tags: Iterable[str] = ("a",), title: str = "spec", **changes: object
) -> Program:
    """One for causal attention of this head dim, with a kernel for each tag: equal tags stand for
    equal cubins. changes: fields of the binaries."""
    problem = dataclasses.replace(PROBLEM, head_dim_qk=head_dim, head_dim_v=head_dim)
    kernels = []
    for tag in tags:
        binary = dataclasses.replace(make_binary(cubin_for(tag)), problem=problem, **changes)  # type: ignore[arg-type]
        kernels.append(BundledKernel(binary, {"tile": tag}, "0" * 64))
    return Program(problem, ARCH, (title,), tuple(kernels))


def cubin_of(binary: Binary) -> bytes:
    """The bytes of which `make_program` made the binary."""
    for tag in ("a", "b", "c", "d", "0", "1", "2"):
        if hashlib.sha256(cubin_for(tag)).hexdigest() == binary.cubin_sha256:
            return cubin_for(tag)
    raise AssertionError(f"no tag has {binary.cubin_sha256}")


def write(path: Path, *programs: Program) -> Path:
    bundle_write.write(path, programs, cubin_of)
    return path


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return [(info, archive.read(info)) for info in archive.infolist()]


def our_member(name: str) -> zipfile.ZipInfo:
    """Describe a member as the writer does."""
    method = zipfile.ZIP_STORED if name == MANIFEST else zipfile.ZIP_DEFLATED
    return bundle_write.plain_member(name, method)


def seal(covered: bytes) -> bytes:
    """With the digest that fits. covered: all bytes before it."""
    return covered + hashlib.sha256(covered).hexdigest().encode()


def reseal(data: bytes) -> bytes:
    """Put the digest that fits the changed archive at its end."""
    return seal(data[:-DIGEST_BYTES])


def craft(
    contents: Members, comment: bytes = MARK + b"0" * DIGEST_BYTES, prefix: bytes = b""
) -> bytes:
    """An archive of the members as they are described, with the right digest."""
    buffer = io.BytesIO(prefix)
    buffer.seek(len(prefix))
    with zipfile.ZipFile(buffer, "a" if prefix else "w") as archive:
        for info, data in contents:
            archive.writestr(info, data, info.compress_type)
        archive.comment = comment
    return reseal(buffer.getvalue())


def edit_manifest(path: Path, edit: Edit) -> None:
    """Changes the manifest of a bundle, which keeps its form and gets the digest that fits."""
    changed: Members = []
    for info, data in members(path):
        if info.filename == MANIFEST:
            manifest = json.loads(data)
            replaced = edit(manifest)
            data = json.dumps(manifest if replaced is None else replaced).encode()
        changed.append((our_member(info.filename), data))
    path.write_bytes(craft(changed))


def read_all(path: Path) -> list[Program]:
    """All that a bundle has, checked."""
    return Bundle(path).verify()
