"""Streams of cubins that no attngen wrote, in archives whose digest is right: refused before use,
and never inflated beyond what a cubin may have."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from attngen.errors import BundleError
from attngen.ship.bundle import DIGEST_BYTES, MARK, Bundle
from attngen.ship.writer import merge
from tests.support.bundle_kit import (
    craft,
    cubin_for,
    make_program,
    members,
    our_member,
    read_all,
    reseal,
    write,
)

COMMENT = MARK + b"0" * DIGEST_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a bundle with the one cubin `a`."""
    return write(tmp_path / "kernels.attn", make_program(64, "a"))


@contextlib.contextmanager
def memory_within(most: int) -> Iterator[None]:
    """Python's own objects, the peak of them in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_open_zip_bomb_is_refused_without_being_unpacked(path: Path) -> None:
    bomb = our_member("cubins/" + "0" * 64 + ".cubin")
    path.write_bytes(craft([(bomb, bytes(1 << 26)), *members(path)]))
    assert path.stat().st_size < 1 << 18
    too_many = pytest.raises(BundleError, match=f"{1 << 26} bytes are no kernel")
    with memory_within(1 << 22), too_many:
        Bundle(path)


def test_read_zip_bomb_that_says_it_is_small_is_not_unpacked(path: Path) -> None:
    """A member's header may say any size: of what it inflates to, no more is made."""
    (first, _), *rest = members(path)
    path.write_bytes(craft([(our_member(first.filename), bytes(1 << 26)), *rest]))
    data = bytearray(path.read_bytes())
    for place in (22, data.index(b"PK\1\2") + 24):
        struct.pack_into("<I", data, place, len(cubin_for("a")))
    path.write_bytes(reseal(bytes(data)))
    bundle = Bundle(path)
    with memory_within(1 << 22), pytest.raises(BundleError, match="is damaged"):
        bundle.verify()


def small_stream(level: int, data: bytes = cubin_for("a")) -> bytes:
    stream = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


STREAMS = {  # where the manifest has the cubin `a`
    "cut short": small_stream(6)[:-1],
    "empty": b"",
    "with a byte behind it": small_stream(6) + b"\0",
    "twice": small_stream(6) * 2,
    "of a block type that there is not": b"\x07" + small_stream(6)[1:],
    "without an end": small_stream(0)[:5].replace(b"\1", b"\0", 1) + cubin_for("a"),
    "with a header of zlib": zlib.compress(cubin_for("a")),
    "of a longer cubin": small_stream(6, cubin_for("ab")),
    "of a shorter cubin": small_stream(6, b"\x7fELF"),
    "of another cubin": small_stream(6, cubin_for("b")),
}


@pytest.mark.parametrize("name", STREAMS)
def test_read_stream_that_is_not_the_cubin_alone_is_refused(name: str, path: Path) -> None:
    (first, _), (second, manifest) = members(path)
    stored = our_member(first.filename)
    stored.compress_type = zipfile.ZIP_STORED
    data = bytearray(craft([(stored, STREAMS[name]), (our_member(second.filename), manifest)]))
    directory = data.index(b"PK\1\2")
    for header, place in ((0, 8), (directory, 10)):
        struct.pack_into("<H", data, header + place, zipfile.ZIP_DEFLATED)
        struct.pack_into("<I", data, header + place + 14, len(cubin_for("a")))
    path.write_bytes(reseal(bytes(data)))
    bundle = Bundle(path)
    with pytest.raises(BundleError, match="is damaged, or has changed"):
        bundle.verify()


def test_read_stream_of_another_zlib_is_the_same_cubin(path: Path, tmp_path: Path) -> None:
    """Its bytes may be others; what counts is what it inflates to."""
    (first, cubin), (second, manifest) = members(path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(our_member(first.filename), cubin, compresslevel=0)
        archive.writestr(our_member(second.filename), manifest)
        archive.comment = COMMENT
    other = tmp_path / "other.attn"
    other.write_bytes(reseal(buffer.getvalue()))
    assert other.read_bytes() != path.read_bytes()
    assert read_all(other) == read_all(path)
    merge(tmp_path / "merged.attn", [Bundle(other)])
    assert (tmp_path / "merged.attn").read_bytes() == path.read_bytes()
