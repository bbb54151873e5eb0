"""Fuzzing of the spec parser: whatever a file holds, specs or a SpecError that names the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attngen.compiler.explain import to_toml
from attngen.errors import SpecError
from attngen.fragments import features
from attngen.io.toml_text import parse, tomllib
from attngen.spec import resolve
from attngen.spec.attention_spec import AttentionSpec, load_specs, parse_specs

FUZZ = settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = [field.name for field in dataclasses.fields(AttentionSpec)]
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.dates()
    | st.text(max_size=9)
    | st.sampled_from(["causal", "bf16", "fwd", "bwd", "sm_90a", "bshd", "none", "learnable"])
    | st.sampled_from([8, 64, 128, 256]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
TABLES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=6)
FILES = st.dictionaries(
    st.sampled_from(["defaults", "kernel"]) | st.text(max_size=5),
    TABLES | st.lists(TABLES | VALUES, max_size=3) | VALUES,
    max_size=3,
)
MARKS = [
    '"',
    "'",
    '"""',
    "'''",
    "\\",
    "#",
    "\n",
    "\r\n",
    "[",
    "]",
    "{",
    "}",
    "=",
    ".",
    ",",
    " ",
    "x",
]
MARKS += ["x = ", "x.y = 1", '""', "''", "1.5", "[[x]]", "[y]", '\\"']
WORDS = ["[[kernel]]", "[defaults]", "\n", "=", "[", "]", '"', "{", "}", ",", "#", "'''", *NAMES]


def check(specs: tuple[AttentionSpec, ...]) -> None:
    """Check that each spec is one in every field, and is resolved or refused."""
    for spec in specs:
        assert type(spec.head_dim) is int and type(spec.window) is bool
        assert all(isinstance(each, str) for each in (*spec.directions, *spec.arch, spec.title))
        try:
            assert resolve.resolve(spec, features.scan()) or not spec.directions
        except SpecError as error:
            assert error.reasons


@pytest.mark.slow
@FUZZ
@given(FILES)
@example({"kernel": [{"head_dim": [64] * 50, "mask": ["none"] * 50, "dtype": ["bf16"] * 50}]})
def test_fuzz_parsed_tables(data: dict[str, Any]) -> None:
    try:
        specs = parse_specs(data, "fuzz.toml")
    except SpecError as error:
        assert all("fuzz.toml" in reason for reason in error.reasons)
        return
    check(specs)


@FUZZ
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=30).map(" ".join))
def test_fuzz_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fuzz.toml"
    path.write_text(text, errors="surrogatepass")
    try:
        specs = load_specs(path)
    except SpecError as error:
        assert str(path) in str(error)
        return
    check(specs)


def depth(value: Any) -> int:
    """How many tables lie in one another."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict) + max(map(depth, inner), default=0)


@pytest.mark.slow
@settings(FUZZ, max_examples=2000)
@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=2), max_size=12).map("".join))
@example("x = '''a'''''\n")
@example('x = """\\"""a""""\n')
@example("x = [ # ]\n")
def test_fuzz_deep_keys_are_seen_wherever_a_parser_sees_them(text: str) -> None:
    """Behind strings, comments and brackets of any kind, which it takes as a parser does."""
    text += "\n" + ".".join(["k"] * 20) + " = 1\n"
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError):
        with pytest.raises(ValueError):
            parse(text)
        return
    if depth(data) > 20:
        with pytest.raises(ValueError, match="a key of more than"):
            parse(text)


@FUZZ
@given(st.lists(st.sampled_from([*WORDS, *MARKS]) | st.text(max_size=4), max_size=30).map(" ".join))
def test_fuzz_text_is_parsed_as_a_parser_does(text: str) -> None:
    try:
        data = tomllib.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            parse(text)
        return
    assert repr(parse(text).data) == repr(data)


@FUZZ
@given(st.binary(max_size=60))
@example(b"head_dim = " + b"9" * 5000)
@example(b"x = " + b"[" * 100_000)
@example(b"x" + b".x" * 2_000 + b" = 1")
@example(b"x = " + b"{x = " * 50_000)
def test_fuzz_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fuzz.toml"
    path.write_bytes(data)
    with pytest.raises(SpecError, match="fuzz.toml"):
        load_specs(path)


@FUZZ
@given(
    st.builds(
        AttentionSpec,
        head_dim=st.integers(-(2**63), 2**63 - 1),
        name=st.none() | st.text(min_size=1, max_size=20),
        mask=st.text(max_size=20),
        arch=st.lists(st.text(max_size=5), min_size=1, max_size=3).map(tuple),
    )
)
def test_fuzz_spec_written_as_toml_is_read_back(tmp_path: Path, spec: AttentionSpec) -> None:
    path = tmp_path / "fuzz.toml"
    path.write_text("\n".join(to_toml(spec)), encoding="utf-8")
    assert load_specs(path) == (spec,)
