"""Bundles: equal contents give equal bytes; what is read is what was written; damage is seen."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import zipfile
import zlib
from pathlib import Path

import pytest

from attngen.errors import BundleError
from attngen.runtime.program import Binary
from attngen.ship import writer as bundle_write
from attngen.ship.bundle import MANIFEST, SUFFIX, Bundle, member_of
from tests.support.bundle_kit import cubin_for, cubin_of, make_program, read_all, write

A, B = make_program(64, "a", "first"), make_program(128, ("b", "c"), "second")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a bundle of two programs."""
    return write(tmp_path / f"two{SUFFIX}", A, B)


def test_bundle_read_back_is_what_was_written(path: Path) -> None:
    bundle = Bundle(path)
    assert {program.key: program for program in bundle.programs()} == {A.key: A, B.key: B}
    assert bundle.problems == {A.key: ("first",), B.key: ("second",)}
    assert repr(bundle) == f"Bundle({str(path)!r}, variants=2, sha256={bundle.sha256!r})"
    assert [bundle.cubin(binary) for binary in B.binaries] == [cubin_for("b"), cubin_for("c")]
    assert bundle.program(make_program(96).problem, A.arch) is None
    assert bundle.program(A.problem, "sm_80") is None


def test_bundle_bytes_depend_on_contents_alone(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    again = write(tmp_path / "elsewhere" / "x", B, A)
    os.utime(again, (0, 0))
    assert again.read_bytes() == path.read_bytes()
    titles = dataclasses.replace(A, titles=("z", "a"))
    swapped = dataclasses.replace(A, titles=("a", "z"))
    first, second = write(tmp_path / "1", titles), write(tmp_path / "2", swapped)
    assert first.read_bytes() == second.read_bytes()


def test_bundle_bytes_are_the_same_from_every_python(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new Python or a slip in the writer would make other bytes of the same kernels."""
    with zipfile.ZipFile(path) as archive:
        cubins = [name for name in archive.namelist() if name.startswith("cubins/")]
        places = [(info.date_time, info.create_system, info.extra) for info in archive.infolist()]
    assert cubins == sorted(cubins) and set(places) == {((1980, 1, 1, 0, 0, 0), 3, b"")}
    monkeypatch.setattr(bundle_write, "SCHEMA_VERSION", 2)
    empty = write(path.with_name("empty"))
    assert hashlib.sha256(empty.read_bytes()).hexdigest() == EMPTY_SHA256


EMPTY_SHA256 = "aba05c64123a2d9e11d88eeb7760b27893cbf5541e79d4102c9565dfc382e164"


def test_cubins_are_deflated_and_the_manifest_is_readable(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        methods = {info.filename: info.compress_type for info in archive.infolist()}
    assert methods.pop(MANIFEST) == zipfile.ZIP_STORED
    assert set(methods.values()) == {zipfile.ZIP_DEFLATED}
    assert b'"head_dim_qk": 128' in path.read_bytes()
    bundle = Bundle(path)
    for binary in (*A.binaries, *B.binaries):
        stream = zlib.compressobj(6, wbits=-zlib.MAX_WBITS)
        packed = stream.compress(cubin_of(binary)) + stream.flush()
        assert bundle.stored_bytes(binary) == len(packed)


def test_bundle_moved_and_renamed_works(path: Path, tmp_path: Path) -> None:
    (tmp_path / "a b" / "ü").mkdir(parents=True)
    moved = Path(shutil.move(path, tmp_path / "a b" / "ü" / "kernels"))
    assert len(read_all(moved)) == 2


def test_bundle_is_a_zip_archive_for_other_tools(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert "manifest.json" in archive.namelist()


def test_bundle_of_several_architectures_keeps_them_apart(tmp_path: Path) -> None:
    other = dataclasses.replace(make_program(64, "b", arch="sm_80"), arch="sm_80")
    bundle = Bundle(write(tmp_path / "x", A, other))
    assert {program.arch: program for program in bundle.verify()} == {"sm_90a": A, "sm_80": other}
    assert bundle.program(A.problem, "sm_80") == other


def test_equal_cubins_are_stored_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x", make_program(64, "a"), make_program(128, "a"))
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 2
    assert len(read_all(path)) == 2


def test_write_two_programs_of_one_problem_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="causal_d64_bf16 .* more than once"):
        write(tmp_path / "x", A, make_program(64, "b"))
    assert list(tmp_path.iterdir()) == []


def test_write_cubin_of_another_kernel_is_refused_and_leaves_the_old_bundle(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(BundleError, match="not the one described"):
        bundle_write.write(path, [A], lambda _: b"another")
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


def test_write_holds_one_cubin_at_a_time(tmp_path: Path) -> None:
    alive: list[Binary] = []

    def read(binary: Binary) -> bytes:
        alive.append(binary)
        done = (tmp_path / "x").exists()
        assert not done, "the bundle is in place before it is whole"
        return cubin_of(binary)

    bundle_write.write(tmp_path / "x", [A, B], read)
    assert len(alive) == 3


@pytest.mark.parametrize("target", ["/dev/null", "."])
def test_write_where_no_file_is_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target)
    for path in (Path(target), tmp_path / "link"):
        with pytest.raises(OSError, match="is no file"):
            write(path, A)
    assert not Path("/dev/null").is_file() and not list(Path("/dev").glob(".null.*"))


def test_write_that_is_not_possible_names_the_bundle() -> None:
    with pytest.raises(OSError) as caught:
        write(Path("/proc/x.attn"), A)
    assert str(caught.value).endswith("'/proc/x.attn'")


def test_write_through_a_link_keeps_the_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path.name)
    write(tmp_path / "link", A)
    assert (tmp_path / "link").is_symlink() and len(read_all(path)) == 1


@pytest.mark.timeout(120)
def test_open_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "small", A)
    good = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for bit in range(8 * len(good)):
            byte = good[bit // 8]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(BundleError):
                Bundle(path)
            os.pwrite(file.fileno(), bytes([byte]), bit // 8)
    assert len(read_all(path)) == 1


def test_open_any_shorter_or_longer_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "small", A)
    good = path.read_bytes()
    longer = (good + b"\0", good + b"\n", b"\0" + good, good + good, good + good[-64:])
    for damaged in (*(good[:length] for length in range(len(good))), *longer):
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match=str(path)):
            Bundle(path)


def test_open_what_is_no_file_names_the_path_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="absent.attn: No such file"):
        Bundle(tmp_path / "absent.attn")
    with pytest.raises(BundleError, match=f"{tmp_path}: Is a directory"):
        Bundle(tmp_path)


def test_cubin_after_the_file_was_written_to_is_refused(path: Path) -> None:
    bundle = Bundle(path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member_of(A.binaries[0].cubin_sha256))
    data[info.header_offset + len(info.FileHeader()) + 4] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    with pytest.raises(BundleError, match="has changed"):
        bundle.cubin(A.binaries[0])
    assert bundle.cubin(B.binaries[0]) == cubin_for("b")
    with pytest.raises(BundleError, match="has changed"):
        bundle.data()


def test_cubin_after_the_file_was_cut_short_is_refused(path: Path) -> None:
    bundle = Bundle(path)
    os.truncate(path, 50)
    with pytest.raises(BundleError, match="has changed"):
        bundle.cubin(B.binaries[0])


def test_cubin_after_the_file_was_replaced_or_removed_is_that_of_the_old_one(path: Path) -> None:
    bundle = Bundle(path)
    write(path, make_program(64, "d"))
    assert bundle.cubin(A.binaries[0]) == cubin_for("a")
    path.unlink()
    assert bundle.cubin(B.binaries[1]) == cubin_for("c")


def test_bundle_closes_its_file_when_it_is_dropped(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bundles = [Bundle(path) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    bundles.clear()
    path.write_bytes(b"junk")
    with pytest.raises(BundleError):
        Bundle(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_merge_equals_the_bundle_of_all_and_joins_titles(path: Path, tmp_path: Path) -> None:
    one, two = write(tmp_path / "1", A), write(tmp_path / "2", B)
    bundle_write.merge(tmp_path / "m", [Bundle(two), Bundle(one), Bundle(path)])
    assert (tmp_path / "m").read_bytes() == path.read_bytes()
    again = write(tmp_path / "3", make_program(64, "a", "third"))
    bundle_write.merge(tmp_path / "m", [Bundle(one), Bundle(again)])
    (program,) = read_all(tmp_path / "m")
    assert program.titles == ("first", "third")


@pytest.mark.parametrize(
    "other",
    [
        make_program(64, "b"),
        make_program(64, "ab"),
        # The same cubin launched in another way is another kernel.
        make_program(64, "a", kernel=dataclasses.replace(A.binaries[0].kernel, group_heads=7)),
    ],
)
def test_merge_different_kernels_of_one_problem_is_refused(other: object, tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", A, B), write(tmp_path / "two", other, B)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match="causal_d64_bf16") as caught:
        bundle_write.merge(tmp_path / "m", [Bundle(one), Bundle(two)])
    assert len(caught.value.reasons) == 1
    assert str(one) in str(caught.value) and str(two) in str(caught.value)
    assert not (tmp_path / "m").exists()
