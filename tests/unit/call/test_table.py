"""Whoever lists attention's arguments has those of the table: signatures, types, schemas, specs."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import attngen
from attngen import reference
from attngen.call import fragments, table
from attngen.call.gradient_kernels import MADE_OF
from attngen.call.numbers import Arguments
from attngen.frontends.pytorch import forward, learned, on_reference  # noqa: F401  # operations
from attngen.frontends.pytorch.options import Options
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.call_arguments import call_arguments, score_switches

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
    others = {*table.CARRIERS, "fragment_arguments"}
    assert call_arguments(fragments.KNOWN) == table.ROWS.keys() - others
    features = {row.feature for row in table.ROWS.values() if row.feature}
    assert features < {each.name for each in dataclasses.fields(AttentionSpec)}


def test_tensor_of_a_score_turns_the_switch_that_asks_for_it() -> None:
    switched = dataclasses.replace(fragments.KNOWN["score"]["alibi"], selected_by="dropout")
    known = {**fragments.KNOWN, "score": {"alibi": switched}}
    assert score_switches({"alibi_slopes": 1, "bias": 1}, known) == {"dropout": True}
    assert score_switches({"alibi_slopes": None}, known) == {}


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


def test_every_gradient_of_a_learned_operand_is_made_of_results_by_a_function() -> None:
    learns = (*table.LEARNED, fragments.LEARNED_SLOT)
    gradients = [table.GRADIENT_OF[name] for name in learns]
    assert [*MADE_OF] == [*learned.GRADIENTS] == gradients
    assert [*table.WantedGradients._fields] == ["dq", "dkv", *gradients]


def test_every_tensor_has_a_dtype_and_a_shape_where_no_layout_says_it() -> None:
    for row in table.ROWS.values():
        if row.operands and row.kind != "state":
            assert row.dtype and row.shapes, row.name
        assert row.doc.endswith("."), row.name


def test_operands_with_a_number_for_each_head_have_strides() -> None:
    found = {name for name, row in table.ROWS.items() if row.has_heads}
    slopes = {"alibi_slopes", "sink", "fragment_arguments"}
    assert found == {"descale_q", "descale_k", "descale_v", *slopes}
