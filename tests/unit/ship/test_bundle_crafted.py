"""Archives with the right digest that no attngen wrote: a clear refusal, whatever is in them."""

from __future__ import annotations

import dataclasses
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from attngen.errors import BundleError
from attngen.io.values import to_data
from attngen.runtime.program import SCHEMA_VERSION
from attngen.ship.bundle import DIGEST_BYTES, FORMAT, MANIFEST, MARK, Bundle
from attngen.ship.writer import plain_member
from tests.support.bundle_kit import (
    Edit,
    Members,
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


def refusal(path: Path) -> str:
    """The refusal of a bundle that is opened, or read as a whole."""
    with pytest.raises(BundleError) as caught:
        read_all(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_craft_of_our_members_is_the_bundle_itself(path: Path) -> None:
    """Unchanged members give a sound bundle, so the other tests' changes are what is refused."""
    ours = [(our_member(info.filename), data) for info, data in members(path)]
    assert craft(ours) == path.read_bytes()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_open_cubin_in_another_form_is_refused(method: int, path: Path) -> None:
    contents = members(path)
    contents[0][0].compress_type = method
    path.write_bytes(craft(contents))
    assert "cubins in a bundle are deflated" in refusal(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_open_manifest_in_another_form_is_refused(method: int, path: Path) -> None:
    contents = members(path)
    contents[-1][0].compress_type = method
    path.write_bytes(craft(contents))
    assert "manifest.json: is stored as it is" in refusal(path)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "cubins/../../../x.cubin",
        "cubins/" + "0" * 63 + ".cubin",
        "cubins/" + "A" * 64 + ".cubin",
        "cubins/" + "0" * 64 + ".cubin/",
        "cubins/" + "0" * 64 + ".cubin\n",
        "Manifest.json",
        "manifest.json/",
        "extra.txt",
        "ü.cubin",
        "cubins/",
    ],
)
def test_open_member_of_another_name_is_refused(name: str, path: Path) -> None:
    path.write_bytes(craft([*members(path), (our_member(name), b"x")]))
    before = sorted(path.parent.rglob("*"))
    assert "has no place in a bundle" in refusal(path)
    assert sorted(path.parent.rglob("*")) == before


def test_open_member_that_is_there_twice_is_refused(path: Path) -> None:
    for which in (0, -1):
        contents = members(path)
        with pytest.warns(UserWarning, match="Duplicate"):
            doubled = craft([*contents, (our_member(contents[which][0].filename), b"{}")])
        path.write_bytes(doubled)
        assert "more than once" in refusal(path)
        path = write(path, A, B)


def test_open_local_extra_field_that_shifts_the_data_is_refused(path: Path) -> None:
    """The directory does not show it; who trusts that alone reads a cubin 8 bytes off."""
    data = path.read_bytes()
    first, second = data.index(b"PK\3\4"), data.index(b"PK\3\4", 4)
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, first + 26)
    assert extra_bytes == 0
    shifted = bytearray(data)
    struct.pack_into("<H", shifted, first + 28, 8)
    shifted[first + 30 + name_bytes : first + 30 + name_bytes] = b"\xfe\xca\4\0evil"
    end = shifted.rindex(b"PK\5\6")
    (directory,) = struct.unpack_from("<I", shifted, end + 16)
    struct.pack_into("<I", shifted, end + 16, directory + 8)
    at = directory + 8
    for number in range(len(members(path))):
        place = struct.unpack_from("<I", shifted, at + 42)[0]
        struct.pack_into("<I", shifted, at + 42, place + (8 if number else 0))
        at += 46 + sum(struct.unpack_from("<HHH", shifted, at + 28))
    path.write_bytes(reseal(bytes(shifted)))
    assert second and zipfile.ZipFile(path).testzip() is None, "any unpacker takes it"
    assert "not where the directory says" in refusal(path)


def test_open_extra_field_in_header_and_directory_is_refused(path: Path) -> None:
    contents = members(path)
    contents[0][0].extra = b"\xfe\xca\4\0evil"
    path.write_bytes(craft(contents))
    assert "not where the directory says" in refusal(path)


def test_open_bytes_hidden_before_between_or_behind_members_are_refused(path: Path) -> None:
    contents, data = members(path), path.read_bytes()
    path.write_bytes(craft(contents, prefix=b"#!/bin/sh\n"))
    assert "not where the directory says" in refusal(path)
    path.write_bytes(craft(contents, comment=MARK + b"1" * 64 + b"hidden" + COMMENT))
    assert "belong to no member" in refusal(path)
    end = data.rindex(b"PK\5\6")
    (directory,) = struct.unpack_from("<I", data, end + 16)
    hidden = bytearray(data)
    struct.pack_into("<I", hidden, end + 16, directory + 6)
    hidden[directory:directory] = b"hidden"
    path.write_bytes(reseal(bytes(hidden)))
    assert "belong to no member" in refusal(path)


@pytest.mark.parametrize("offset", [0, 1, 100, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
def test_open_member_elsewhere_than_it_is_is_refused(offset: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 4)
    struct.pack_into("<I", data, second + 42, offset)
    path.write_bytes(reseal(bytes(data)))
    refusal(path)


@pytest.mark.parametrize("size", [0, 1, 10_000_000, 0xFFFFFFFE, 0xFFFFFFFF])
@pytest.mark.parametrize("everywhere", [False, True])
def test_open_member_of_another_size_is_refused(size: int, everywhere: bool, path: Path) -> None:
    """In the directory alone, or in the member's own header too."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<II", data, data.index(b"PK\1\2") + 20, size, size)
    if everywhere:
        struct.pack_into("<II", data, 18, size, size)
    path.write_bytes(reseal(bytes(data)))
    refusal(path)


def test_open_member_marked_as_encrypted_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in (6, data.index(b"PK\1\2") + 8):
        data[place] |= 1
    path.write_bytes(reseal(bytes(data)))
    assert "cubins in a bundle are deflated" in refusal(path)


def test_open_first_format_whose_members_were_all_stored_says_what_to_do(path: Path) -> None:
    stored = [(plain_member(info.filename), data) for info, data in members(path)]
    (last, manifest) = stored.pop()
    old = manifest.replace(b'"format": %d' % FORMAT, b'"format": 1')
    path.write_bytes(craft([*stored, (last, old)]))
    assert f"format 1, this attngen reads {FORMAT}: build it anew" in refusal(path)


def test_open_archive_without_manifest_is_refused(path: Path) -> None:
    path.write_bytes(craft([each for each in members(path) if each[0].filename != MANIFEST]))
    assert "manifest.json is missing" in refusal(path)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("format", FORMAT + 1, "update attngen"),
        ("format", FORMAT - 1, "build it anew"),
        ("schema", SCHEMA_VERSION + 1, "update attngen"),
        ("schema", SCHEMA_VERSION - 1, "build it anew"),
        ("schema", None, "build it anew"),
        ("format", "1", "build it anew"),
        ("format", [], "build it anew"),
    ],
)
def test_open_other_version_says_what_to_do(
    name: str, value: object, advice: str, path: Path
) -> None:
    edit_manifest(path, lambda manifest: manifest.update({name: value}))
    assert advice in refusal(path)


def _program(manifest: dict[str, Any]) -> dict[str, Any]:
    program: dict[str, Any] = manifest["programs"][0]
    return program


def _kernel(manifest: dict[str, Any]) -> dict[str, Any]:
    kernel: dict[str, Any] = _program(manifest)["kernels"][0]
    return kernel


OTHER_PROBLEM = dataclasses.replace(A.problem, masks=())
# What is done to a manifest → a part of what is said.
EDITS: dict[str, tuple[Edit, str]] = {
    "a list": (lambda m: [], "no object"),
    "no programs": (lambda m: m.pop("programs") and None, "programs"),
    "programs a number": (lambda m: m.update(programs=3), "not a bundle"),
    "program a list": (lambda m: m.update(programs=[[]]), "expected an object"),
    "program twice": (lambda m: m["programs"].append(m["programs"][0]), "several programs"),
    "field unknown": (lambda m: _program(m).update(evil=1), "evil"),
    "field missing": (lambda m: _program(m).pop("titles") and None, "titles"),
    "problem of another form": (lambda m: _program(m).update(problem={}), "missing fields"),
    "titles a text": (lambda m: _program(m).update(titles="abc"), "titles"),
    "no kernel": (lambda m: _program(m).update(kernels=[]), "no kernel"),
    "kernel a number": (lambda m: _program(m).update(kernels=[3]), "expected an object"),
    "kernel of another problem": (
        lambda m: _program(m).update(problem=to_data(OTHER_PROBLEM)),
        "another problem",
    ),
    "kernel of another architecture": (
        lambda m: _program(m).update(arch="sm_80"),
        "another problem or architecture",
    ),
    "program for another kernel's architecture": (
        lambda m: _kernel(m)["binary"].update(arch="sm_80"),
        "another problem or architecture",
    ),
    "kernels swapped": (
        lambda m: m["programs"][0].update(kernels=m["programs"][1]["kernels"]),
        "another problem",
    ),
    "cubin of nobody": (
        lambda m: _kernel(m)["binary"].update(cubin_sha256="0" * 64),
        "has no cubin",
    ),
    "cubin a path": (
        lambda m: _kernel(m)["binary"].update(cubin_sha256="../../etc/passwd"),
        "has no cubin",
    ),
    "cubin idle": (lambda m: m["programs"].pop() and None, "no program uses"),
    "binary of another form": (lambda m: _kernel(m).update(binary={"schema": 2}), "missing"),
    "threads a text": (
        lambda m: _kernel(m)["binary"]["kernel"].update(threads="384"),
        "threads",
    ),
    "grid unknown": (lambda m: _kernel(m)["binary"]["kernel"].update(grid="all"), "grid"),
}


@pytest.mark.parametrize("name", EDITS)
def test_manifest_that_does_not_fit_is_refused(name: str, path: Path) -> None:
    edit, part = EDITS[name]
    edit_manifest(path, edit)
    assert part in refusal(path)


def test_cubins_swapped_under_their_names_are_refused_before_use(path: Path) -> None:
    (one, first), (two, second), *rest = members(path)
    one, two = our_member(one.filename), our_member(two.filename)
    path.write_bytes(craft([(one, second), (two, first), *rest]))
    bundle = Bundle(path)
    with pytest.raises(BundleError, match="is damaged"):
        bundle.verify()
    for program in bundle.programs():
        for binary in program.binaries[:1]:
            if binary.cubin_sha256 in (one.filename[7:71], two.filename[7:71]):
                with pytest.raises(BundleError):
                    bundle.cubin(binary)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"NaN", b'{"a":1e999}'])
def test_manifest_that_is_no_json_is_refused(text: bytes, path: Path) -> None:
    contents: Members = [(our_member(MANIFEST), text)]
    path.write_bytes(craft(contents))
    refusal(path)
