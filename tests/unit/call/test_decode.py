"""Split keys and pages, as kernels are told of them."""

from __future__ import annotations

from attngen.call import decode
from attngen.call.numbers import Arguments
from attngen.call.operands import extents_of, keys_of, scalars_of
from attngen.call.table import OPTIONAL
from attngen.call.tensors import TensorDesc
from attngen.runtime.run_time import Extent

PAGED = "paged_kv_bshd_bshd_bshd"


def test_mask_over_pages_broadcast_over_keys_stands_for_all_that_there_is_room_for() -> None:
    q = TensorDesc.contiguous((3, 2, 4, 16), "bfloat16")
    k = TensorDesc.contiguous((9, 8, 2, 16), "bfloat16")
    table = TensorDesc.contiguous((3, 3), "int32")
    optional = dict.fromkeys(OPTIONAL) | dict.fromkeys(("page_table_k", "page_table_v"), table)
    optional["attn_mask"] = TensorDesc.contiguous((3, 1, 2, 1), "bool")
    extents = extents_of({"q": q, "k": k, "v": k}, PAGED)
    found = scalars_of(q, optional, Arguments(layout=PAGED), extents)
    assert found.numbers["attn_mask_keys"] == 3 * 8


def test_keys_of_tables_of_two_widths_are_those_of_the_narrower() -> None:
    """Keys behind the narrower table's end have no page of the other."""
    extents = {"k": Extent(9, 8, 2, 16, 0, 0, 0), "v": Extent(9, 32, 2, 16, 0, 0, 0)}
    tables = {
        "page_table_k": TensorDesc.contiguous((3, 5), "int32"),
        "page_table_v": TensorDesc.contiguous((3, 1), "int32"),
    }
    assert keys_of(extents, tables) == 32
    numbers = decode.numbers_of(extents, tables)
    assert numbers["kv_room"] == 32 and numbers["v_page_size"] == 32
    assert (numbers["k_page_table_stride"], numbers["v_page_table_stride"]) == (5, 1)
