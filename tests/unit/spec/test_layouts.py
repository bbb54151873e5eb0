"""Layout names, packed tensors as views, and the refusals, without any tensor library."""

import ast
from pathlib import Path

import pytest
import torch

from attngen.errors import SpecError
from attngen.spec import layouts
from tests.support.paths import ROOT

SIZES = {"s": 5, "b": 2, "h": 4, "d": 8, "t": 11}
PACKED = [name for name in layouts.NAMES if layouts.parse(name).packing != "none"]


def packed_shape(axes: str) -> list[int]:
    """Sizes of an operand named as in a layout, `bs3hd` for one; digits are packed axes."""
    return [int(a) if a.isdigit() else SIZES[a] for a in axes]


def test_module_source_imports_no_torch():
    tree = ast.parse(Path(layouts.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert "errors" in imported
    assert not any(name.startswith("torch") for name in imported)


def test_names_all_listed_once_and_parse_to_themselves():
    assert len(layouts.NAMES) == len(set(layouts.NAMES)) == 26
    assert [layouts.parse(name).name for name in layouts.NAMES] == list(layouts.NAMES)


@pytest.mark.parametrize("name", [n for n in layouts.NAMES if layouts.parse(n).packing == "none"])
def test_parse_unpacked_name_gives_formats_in_the_name(name):
    layout = layouts.parse(name)
    q_format, k_format, v_format = name.removeprefix("paged_kv_").split("_")
    assert (layout.q_format, layout.kv_format) == (q_format, k_format)
    assert k_format == v_format
    assert layout.paged == name.startswith("paged_kv_")


@pytest.mark.parametrize("name", layouts.FORMATS)
def test_parse_short_name_gives_three_tensor_layout(name):
    assert layouts.parse(name) == layouts.parse(f"{name}_{name}_{name}")


@pytest.mark.parametrize("name", ["", "bhds", "bshd_bshd", "paged_kv_bhsd_bhsd_bhsd", "BSHD"])
def test_parse_unknown_name_lists_every_name(name):
    with pytest.raises(ValueError) as caught:
        layouts.parse(name)
    assert isinstance(caught.value, SpecError)
    assert all(known in str(caught.value) for known in layouts.NAMES)


@pytest.mark.parametrize("name", PACKED)
def test_unpack_packed_layout_gives_views_that_select_the_packed_axis(name):
    layout = layouts.parse(name)
    axes = name.split("_")
    packed = torch.randn(packed_shape(axes[-1]))
    digit = "3" if "3" in axes[-1] else "2"
    at = axes[-1].index(digit)
    if layout.one_length:
        parts = layouts.unpack(layout, packed)
    else:
        q = torch.randn(packed_shape(axes[0]))
        got_q, *parts = layouts.unpack(layout, q, packed)
        assert got_q is q
    assert len(parts) == int(digit)
    for index, part in enumerate(parts):
        assert torch.equal(part, packed.select(at, index))
        assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert list(part.shape) == packed_shape(layout.kv_format)


def test_unpack_head_stride_follows_packing():
    by_three = layouts.unpack(layouts.parse("bs3hd"), torch.randn(2, 5, 3, 4, 8))[0]
    by_head = layouts.unpack(layouts.parse("bsh3d"), torch.randn(2, 5, 4, 3, 8))[0]
    assert (by_three.stride(2), by_head.stride(2)) == (8, 24)


@pytest.mark.parametrize(
    ("name", "shapes", "said"),
    [
        ("bshd", [[2, 5, 4, 8], None, [2, 5, 4, 8]], "needs k"),
        ("bshd", [[2, 5, 8], [2, 5, 4, 8], [2, 5, 4, 8]], "q of shape [b, s, h, d]"),
        ("bs3hd", [[2, 5, 3, 4, 8], [2, 5, 4, 8], None], "a separate k"),
        ("bs3hd", [[2, 5, 4, 3, 8], None, None], "[b, s, 3, h, d]"),
        ("th3d", [[11, 3, 4, 8], None, None], "[t, h, 3, d]"),
        ("bshd_bs2hd", [[2, 5, 4, 8], [2, 5, 3, 4, 8], None], "[b, s, 2, h, d]"),
        ("bshd_bs2hd", [[2, 5, 4, 8], [2, 5, 2, 4, 8], [2, 5, 4, 8]], "a separate v"),
        ("paged_kv_bshd_sbhd_sbhd", [[2, 5, 4, 8]] * 2 + [[3, 2, 8]], "[page_size, pages, h, d]"),
    ],
)
def test_unpack_wrong_operands_says_what_is_expected(name, shapes, said):
    tensors = [None if shape is None else torch.zeros(shape) for shape in shapes]
    with pytest.raises(SpecError) as caught:
        layouts.unpack(layouts.parse(name), *tensors)
    assert said in str(caught.value)


def test_unpack_several_wrong_operands_reports_all():
    with pytest.raises(SpecError) as caught:
        layouts.unpack(layouts.parse("bshd"), torch.zeros(2, 8))
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize("fmt", layouts.FORMATS)
def test_size_named_axis_is_found_in_every_format(fmt):
    shape = packed_shape(fmt)
    assert {axis: layouts.size(shape, fmt, axis) for axis in fmt} == {a: SIZES[a] for a in fmt}


def test_semantics_page_names_every_layout_of_dense_and_packed_operands():
    page = (ROOT / "docs" / "guide" / "semantics.md").read_text()
    for name in layouts.NAMES:
        short = name.split("_")[0] if len({*name.split("_")}) == 1 else name
        assert layouts.parse(name).paged or f"`{short}`" in page, name
