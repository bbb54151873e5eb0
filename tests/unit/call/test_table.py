"""Whoever lists attention's arguments has those of the table: signatures, types, schemas, specs."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import attngen
from attngen import reference
from attngen.call import fragments, table
from attngen.call.numbers import Arguments
from attngen.frontends.pytorch import forward, on_reference  # noqa: F401  # define the operations
from attngen.frontends.pytorch.options import Options
from attngen.spec.attention_spec import CALL_ARGUMENTS, AttentionSpec

# As exported programs have them: an operand is added at the end.
OPERANDS = (
    *("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o"),
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("seqused_q", "seqused_kv", "page_table_k", "page_table_v", "alibi_slopes", "sink"),
    *("rng_state", "attn_mask", "bias", "schedule"),
    *("fragment_0", "fragment_1", "fragment_2", "fragment_3"),
)


def test_signatures_are_those_of_the_table() -> None:
    expected = {row.name: (row.default, row.given) for row in table.ROWS.values()}
    expected |= {"q": (inspect.Parameter.empty, "Tensor")}
    expected |= {"fragment_arguments": (inspect.Parameter.empty, "Any")}
    for function, rows in (
        (attngen.attention, table.ROWS),
        (reference.attention, table.REFERENCE_ROWS),
    ):
        parameters = inspect.signature(function).parameters
        found = {name: (x.default, x.annotation) for name, x in parameters.items()}
        assert found == {name: expected[name] for name in rows}
        by_name = {name for name, x in parameters.items() if x.kind == x.KEYWORD_ONLY}
        assert by_name == {*rows} - {*table.CARRIERS, "fragment_arguments"}
        assert parameters["fragment_arguments"].kind == inspect.Parameter.VAR_KEYWORD


def test_reference_refuses_what_is_no_argument_of_it() -> None:
    q = torch.zeros(1, 2, 1, 8)
    for name in ("maks", "backend", "deterministic"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            reference.attention(q, q, q, **{name: None})


def test_type_checkers_see_the_arguments_that_do_not_decide_what_is_returned() -> None:
    decides = {*table.DECIDING, *table.CARRIERS, "fragment_arguments"}
    expected = {row.name: row.given for row in table.ROWS.values() if row.name not in decides}
    found = {name: x.__forward_arg__ for name, x in Options.__annotations__.items()}
    types = {"scalar": "int", "sequence": "int | Tensor"}  # of attngen's own fragments
    for each in fragments.operands_of("chunked", None) + fragments.operands_of("prefix", None):
        assert found.pop(each.name) == types[each.operand.domain]
    assert {*found} == {*expected} and found == expected
    shipped = [each for axis in fragments.KNOWN.values() for each in axis.values() if each.called]
    added = {o.name for each in shipped if each.text is None for o in each.operands}
    assert added == {"chunked", "prefix"}


def test_specs_are_derived_of_every_argument() -> None:
    assert {*CALL_ARGUMENTS} == table.ROWS.keys() - {*table.CARRIERS, "fragment_arguments"}
    features = {row.feature for row in table.ROWS.values() if row.feature}
    assert features < {each.name for each in dataclasses.fields(AttentionSpec)}


def test_operations_take_the_operands_in_an_order_that_stays() -> None:
    assert table.OPTIONAL[: len(OPERANDS)] == OPERANDS
    places = [row.place for row in table.ROWS.values() if row.operands]
    assert len({*places}) == len(places) and min(places) == 0
    taken = [*table.INPUTS, *Arguments._fields]
    for name, before, after in (
        ("forward", [], []),
        ("backward", ["d_o", "dlse"], [f"want_{each}" for each in table.WantedGradients._fields]),
        ("reference", [], ["max_seqlen_q", "max_seqlen_kv"]),
    ):
        schema = getattr(torch.ops.attngen, name).default._schema
        found = [each.name for each in schema.arguments if each.name not in ("o", "lse")]
        assert found == [*before, *taken, *after]


def test_every_number_of_the_operations_is_an_arguments() -> None:
    numbers = {number for row in table.ROWS.values() for number in row.numbers}
    assert numbers == {*Arguments._fields}
    makes = {row.gradient for row in table.ROWS.values() if row.gradient}
    assert makes < {*table.WantedGradients._fields}


def test_every_tensor_has_a_dtype_and_a_shape_where_no_layout_says_it() -> None:
    for row in table.ROWS.values():
        if row.operands and row.kind != "state":
            assert row.dtype and row.shapes, row.name
        assert row.doc.endswith("."), row.name


def test_operands_with_a_number_for_each_head_have_strides() -> None:
    found = {name for name, row in table.ROWS.items() if row.has_heads}
    slopes = {"alibi_slopes", "sink", "fragment_arguments"}
    assert found == {"descale_q", "descale_k", "descale_v", *slopes}
