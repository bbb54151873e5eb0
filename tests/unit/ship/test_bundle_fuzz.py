"""Fuzzing of the bundle reader, the digest always right: a BundleError, or what was written."""

from __future__ import annotations

import copy
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attngen.errors import BundleError
from attngen.ship.bundle import DIGEST_BYTES, MARK, Bundle
from tests.support.bundle_kit import (
    craft,
    edit_manifest,
    make_program,
    members,
    our_member,
    read_all,
    reseal,
    write,
)

A, B = make_program(64, "a"), make_program(128, ("b", "c"))
COMMENT = MARK + b"0" * DIGEST_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "kernels.attn", A, B)


FUZZ = settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def anew(path: Path) -> Path:
    """The bundle again; what an example made of it may be no bundle, which none replaces."""
    path.unlink(missing_ok=True)
    return write(path, A, B)


def opens_or_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        programs = read_all(path)
    except BundleError:
        return
    assert {program.key for program in programs} == {A.key, B.key}


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=8)), max_size=4))
@example([(0, b"PK\5\6")])
def test_fuzz_overwritten_bytes_with_the_right_digest(
    path: Path, changes: list[tuple[int, bytes]]
) -> None:
    good = anew(path).read_bytes()
    data = bytearray(good)
    for place, new in changes:
        at = place % len(data)
        data[at : at + len(new)] = new
    opens_or_is_refused(path, reseal(bytes(data[: len(good)])))


@pytest.mark.slow
@FUZZ
@given(st.integers(0, 10_000), st.integers(0, 200), st.binary(max_size=30))
def test_fuzz_cut_and_inserted_bytes_with_the_right_digest(
    path: Path, place: int, removed: int, new: bytes
) -> None:
    good = anew(path).read_bytes()[: -DIGEST_BYTES - len(MARK)]
    at = place % len(good)
    opens_or_is_refused(path, reseal(good[:at] + new + good[at + removed :] + COMMENT))


@FUZZ
@given(st.binary(max_size=200))
def test_fuzz_arbitrary_bytes_with_the_right_digest(path: Path, data: bytes) -> None:
    path.write_bytes(reseal(data + COMMENT))
    with pytest.raises(BundleError):
        Bundle(path)


@pytest.mark.slow
@FUZZ
@given(st.binary(max_size=60), st.integers(0, 2**33), st.integers(0, 9), st.booleans())
def test_fuzz_any_stream_of_any_size_in_the_place_of_a_cubin(
    path: Path, data: bytes, size: int, level: int, deflated: bool
) -> None:
    """Never more than what the directory has is unpacked, and never another cubin is handed out."""
    stream = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    packed = stream.compress(data) + stream.flush() if deflated else data
    (first, good), *rest = members(anew(path))
    own = our_member(first.filename)
    own.compress_type = zipfile.ZIP_STORED
    crafted = bytearray(craft([(own, packed), *((our_member(i.filename), x) for i, x in rest)]))
    for header, place in ((0, 8), (crafted.index(b"PK\1\2"), 10)):
        struct.pack_into("<H", crafted, header + place, zipfile.ZIP_DEFLATED)
        struct.pack_into("<I", crafted, header + place + 14, size % 2**32)
    path.write_bytes(reseal(bytes(crafted)))
    try:
        bundle = Bundle(path)
        assert good in [bundle.cubin(each) for p in bundle.programs() for each in p.binaries]
    except BundleError:
        assert data != good or size != len(good) or not deflated


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path to a value inside."""
    items = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else items
    return [at, *(place for key, each in inner for place in _places(each, (*at, key)))]


@pytest.mark.slow
@FUZZ
@given(st.integers(0, 10_000), JSON)
def test_fuzz_any_value_anywhere_in_the_manifest(path: Path, number: int, new: Any) -> None:
    def edit(manifest: dict[str, Any]) -> Any:
        places = _places(manifest)
        place = places[number % len(places)]
        if not place:
            return new
        inner: Any = manifest
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = copy.deepcopy(new)
        return None

    edit_manifest(anew(path), edit)
    try:
        programs = read_all(path)
    except BundleError:
        return
    assert all(program.problem == program.binaries[0].problem for program in programs)
