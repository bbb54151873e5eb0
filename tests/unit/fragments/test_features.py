"""Fragment headers: what is found, and what a wrong header is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.fragments import features
from attngen.io import files

HEADER = """<#
name = "prefix"
doc = "Keys before a prefix are seen by all."
struct = "PrefixMask"
bounds = ["right"]

[[operand]]
name = "prefix"
domain = "scalar"
dtype = "i32"
doc = "Length of the prefix."
#>
<% macro emit() %>
struct PrefixMask {};
<% endmacro %>
"""


def write(folder: Path, text: str, name: str = "prefix.cuh.j2") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_scan_shipped_templates_finds_every_file_under_its_axis() -> None:
    root = files.templates_dir()
    for axis in features.AXES:
        names = {path.name.removesuffix(".cuh.j2") for path in (root / axis).glob("*.cuh.j2")}
        assert set(features.scan(root)[axis]) == names <= set(features.scan()[axis])
    assert {"causal", "window"} <= set(features.scan()["mask"])
    assert "vanilla" in features.scan()["softmax"]


def test_scan_other_root_finds_a_new_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mask").mkdir()
    write(tmp_path / "mask", HEADER)
    found = features.scan(tmp_path)
    assert {axis: [*names] for axis, names in found.items() if names} == {"mask": ["prefix"]}


def test_read_header_complete_one_gives_every_field(tmp_path: Path) -> None:
    fragment = features.read_header(write(tmp_path, HEADER), "mask")
    operand = features.Operand("prefix", "scalar", "i32", "Length of the prefix.")
    assert fragment == features.Fragment(
        axis="mask",
        name="prefix",
        doc="Keys before a prefix are seen by all.",
        struct="PrefixMask",
        bounds=("right",),
        selected_by="mask",
        operands=(operand,),
    )
    assert fragment.template == "mask/prefix.cuh.j2"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("<#\nname", "name", "starts with its TOML header"),
        ("#>", "", "starts with its TOML header"),
        ('name = "prefix"\ndoc', "name = prefix\ndoc", "Invalid value"),
        ('struct = "PrefixMask"\n', "", "struct"),
        ('doc = "Keys before a prefix are seen by all."\n', "", "doc"),
        ('struct = "PrefixMask"\n', 'struct = "PrefixMask"\ncolour = "red"\n', "colour"),
        ('name = "prefix"\ndoc', 'name = "suffix"\ndoc', "'suffix'"),
        ('domain = "scalar"', 'domain = "column"', "'column', known"),
        ('domain = "scalar"\n', "", "domain"),
        ('dtype = "i32"\n', 'dtype = "i32"\nunit = "keys"\n', "unit"),
        # A kernel masks only on the sides that are named: a slip here means wrong results.
        ('bounds = ["right"]', 'bounds = ["rigth"]', "rigth"),
        ('bounds = ["right"]', 'bounds = "right"', "bounds"),
        ('bounds = ["right"]\n', "", "bounds"),
        # A list of masks is made where no head is known, and tensors hold float32.
        ('domain = "scalar"', 'domain = "head"', "elements are f32"),
        ('domain = "scalar"', 'domain = "batch_head"', "reads none but"),
        # Only scores have units.
        ('dtype = "i32"\n', 'dtype = "i32"\nscore_power = 1\n', "score_power"),
        # Masks intersect in any order, and what a call names stands where the call says.
        ('bounds = ["right"]', 'bounds = ["right"]\norder = 1', "order is an integer, of a score"),
        ('bounds = ["right"]', 'bounds = ["right"]\nchoice = "a"', "order and choice are of"),
        # The parameter struct knows no other types.
        ('dtype = "i32"', 'dtype = "int"', "'int'"),
    ],
)
def test_read_header_wrong_one_is_refused_by_file_and_reason(
    old: str, new: str, reason: str, tmp_path: Path
) -> None:
    assert HEADER.count(old) == 1
    path = write(tmp_path, HEADER.replace(old, new))
    with pytest.raises(ValueError, match=reason) as caught:
        features.read_header(path, "mask")
    assert str(path) in str(caught.value)


def test_read_header_file_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the file's"):
        features.read_header(write(tmp_path, HEADER, "suffix.cuh.j2"), "mask")


def test_scan_folder_with_a_wrong_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "score").mkdir()
    path = write(tmp_path / "score", "struct NoHeader {};")
    with pytest.raises(ValueError, match=str(path)):
        features.scan(tmp_path)
