"""Masks made before a call: where their parts lie, and which are refused."""

from __future__ import annotations

import pytest

from attngen.call.made_mask import (
    asked_parts_of,
    is_asked,
    numbers_of,
    parts_of,
    sources_of,
    violations,
)
from attngen.call.tensors import TensorDesc


@pytest.mark.parametrize(("s_q", "s_kv"), [(1, 1), (64, 65), (200, 4097)])
@pytest.mark.parametrize("columns", [True, False])
def test_parts_lie_behind_each_other_in_whole_16_bytes(s_q, s_kv, columns) -> None:
    parts = parts_of(s_q, s_kv, columns=columns)
    sizes = {
        "mask_row_map": parts.row_map,
        "mask_column_map": parts.column_map,
        "mask_rows": parts.rows,
        "mask_columns": parts.columns,
    }
    at = 0
    for name, start in sorted(parts.starts.items(), key=lambda item: item[1]):
        assert start == at and start % 4 == 0 and sizes[name] > 0
        at += sizes[name]
    assert at == parts.words and ("mask_columns" in parts.starts) is columns
    assert parts.map_words == parts.starts["mask_rows"]
    made = TensorDesc.contiguous((2, 3, parts.words), "int32")
    numbers = numbers_of(made, s_q, s_kv)
    assert numbers["mask_rows_stride_batch"] == 3 * parts.words
    assert numbers["mask_row_map_stride_head"] == parts.words
    found = dict((name, place) for name, _, place in sources_of(made, s_q, s_kv))
    assert found == {name: 4 * start for name, start in parts.starts.items()}


def test_masks_of_other_calls_and_of_no_gradients_are_refused() -> None:
    short, whole = (parts_of(70, 90, columns=each).words for each in (False, True))

    def reasons(shape: tuple[int, ...], backward: bool = False) -> list[str]:
        made = TensorDesc.contiguous(shape, "int32")
        return [*violations(made, 2, 4, 70, 90, backward=backward)]

    for shape in ((1, 1, whole), (2, 4, short), (2, 1, whole)):
        assert not reasons(shape)
    assert not reasons((1, 4, whole), backward=True)
    for shape in ((3, 1, whole), (1, 2, whole), (1, 1, whole + 4), (4, whole)):
        assert "attn_mask of int32 is one that attngen made" in reasons(shape)[0]
    assert reasons((1, 1, short), backward=True)


@pytest.mark.parametrize("planes", [(1, 1), (2, 4), (1, 4)])
def test_what_a_program_reads_lies_behind_the_maps_of_all_planes(planes) -> None:
    batches, heads = planes
    parts = asked_parts_of(70, 90)
    count = batches * heads
    made = TensorDesc.contiguous((*planes, 1, parts.words + 3), "int32")
    assert is_asked(made) and not [*violations(made, 2, 4, 70, 90, backward=True)]
    places = dict((name, place) for name, _, place in sources_of(made, 70, 90))
    state = 4 * count * parts.words
    assert places["mask_rows"] == places["mask_columns"] == places["mask_state"] == state
    assert places["mask_column_map"] == 4 * parts.row_map > places["mask_row_map"] == 0
    numbers = numbers_of(made, 70, 90)
    assert numbers["mask_row_map_stride_head"] == (parts.words if heads > 1 else 0)
    assert numbers["mask_column_map_stride_batch"] == (heads * parts.words if batches > 1 else 0)
    without_state = TensorDesc.contiguous((*planes, 1, parts.words), "int32")
    assert [*violations(without_state, 2, 4, 70, 90, backward=False)]


def test_memory_of_maps_is_a_small_part_of_that_of_bits() -> None:
    s = 1 << 17
    assert asked_parts_of(s, s).words * 500 < parts_of(s, s, columns=True).words
