"""Values: frozen dataclasses to JSON and back, and what a wrong JSON is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.io.values import from_data, from_json, to_data, to_json
from attngen.kernels.plan import candidates
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.runtime.program import SCHEMA_VERSION, Binary, Resources
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import Problem

WORDS = st.text(max_size=12)
OPTIONAL_WORDS = st.none() | WORDS
DIMS = st.integers(-(2**40), 2**40)


@dataclass(frozen=True)
class Inner:
    size: int
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    ratio: float = 1.0
    note: str | None = None


SPECS = st.builds(
    AttentionSpec,
    head_dim=DIMS,
    head_dim_v=st.none() | DIMS,
    dtype=WORDS,
    kv_dtype=OPTIONAL_WORDS,
    out_dtype=OPTIONAL_WORDS,
    layout=WORDS,
    mask=WORDS,
    window=st.booleans(),
    bias=WORDS,
    alibi=st.booleans(),
    softmax=WORDS,
    deterministic=st.booleans(),
    directions=st.lists(WORDS).map(tuple),
    arch=st.lists(WORDS).map(tuple),
    name=OPTIONAL_WORDS,
)


@given(SPECS)
def test_json_any_spec_comes_back_equal(spec: AttentionSpec) -> None:
    text = to_json(spec)
    assert from_json(AttentionSpec, text) == spec
    assert to_json(from_json(AttentionSpec, text)) == text
    assert from_json(AttentionSpec, to_json(spec, indent=2)) == spec


@pytest.mark.parametrize("masks", ((), ("causal",), ("causal", "window")))
def test_json_problem_plans_and_binary_come_back_equal(masks, make_problem, render) -> None:
    problem = make_problem(192, 128, masks, out="fp32")
    assert from_json(Problem, to_json(problem)) == problem
    for plan in candidates(problem, "sm_90a"):
        assert from_json(Plan, to_json(plan)) == plan
    binary = Binary(
        schema=SCHEMA_VERSION,
        arch="sm_90a",
        problem=problem,
        kernel=render(problem).kernel,
        resources=Resources(168, 0, 0, 1000),
        toolchain="nvrtc 13.0",
        source_sha256="0" * 64,
        cubin_sha256="1" * 64,
    )
    assert from_json(Binary, to_json(binary)) == binary


def test_json_equal_values_give_equal_sorted_text() -> None:
    text = to_json(AttentionSpec(head_dim=64))
    assert text == to_json(AttentionSpec(64))
    assert [*json.loads(text)] == sorted(json.loads(text))
    assert " " not in text and "\n" not in text


def test_to_data_holds_plain_json_types_only() -> None:
    outer = Outer(Inner(1), (Inner(2, "b"),))
    assert to_data(outer) == {
        "inner": {"size": 1, "kind": "a"},
        "many": [{"size": 2, "kind": "b"}],
        "ratio": 1.0,
        "note": None,
    }


def test_from_data_defaults_and_whole_floats_are_filled_in() -> None:
    data = {"inner": {"size": 1}, "many": [], "ratio": 2}
    value = from_data(Outer, data)
    assert value == Outer(Inner(1), (), 2.0) and type(value.ratio) is float


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"colour": 1}, "colour"),
        ({"inner": None}, "Inner"),
        ({"inner": {}}, "size"),
        ({"inner": {"size": "1"}}, "size"),
        ({"inner": {"size": True}}, "size"),
        ({"inner": {"size": 1.0}}, "size"),
        ({"inner": {"size": 1, "kind": "c"}}, "'c'"),
        ({"many": "ab"}, "many"),
        ({"many": {"size": 1}}, "many"),
        ({"many": [{"size": 1}, {"size": None}]}, "size"),
        ({"ratio": "1"}, "ratio"),
        ({"ratio": True}, "ratio"),
        ({"ratio": None}, "ratio"),
        ({"note": 3}, "note"),
    ],
)
def test_from_data_wrong_value_is_refused_by_field(change: dict, reason: str) -> None:
    data = {"inner": {"size": 1}, "many": [], **change}
    with pytest.raises(ValueError, match=reason):
        from_data(Outer, data)


def test_from_data_missing_field_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="many"):
        from_data(Outer, {"inner": {"size": 1}})


@pytest.mark.parametrize("data", (None, [], "x", 3))
def test_from_data_no_object_at_all_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="Outer"):
        from_data(Outer, data)


def test_from_json_broken_text_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        from_json(Outer, '{"inner": ')


@dataclass(frozen=True)
class Tables:
    figures: dict[str, float]
    parts: dict[str, Inner]
    anything: dict[str, Any]


def test_json_tables_come_back_equal() -> None:
    value = Tables({"a": 1.5, "b": 2}, {"x": Inner(1)}, {"deep": {"list": [1, None, "2"]}})
    assert from_json(Tables, to_json(value)) == value
    assert to_data(value)["parts"] == {"x": {"size": 1, "kind": "a"}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"figures": [1.0]}, "figures: expected an object"),
        ({"figures": {"a": "1"}}, "figures.a"),
        ({"parts": {"x": {"kind": "a"}}}, "size"),
        ({"anything": None}, "anything"),
    ],
)
def test_from_data_wrong_value_in_a_table_is_refused_by_name(change: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_data(Tables, {"figures": {}, "parts": {}, "anything": {}, **change})
