"""Spec files of any contents are read or refused at once: bytes, keys, products, words, reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.errors import SpecError
from attngen.io import toml_text
from attngen.io.toml_text import KEY_LIMIT, parse
from attngen.spec import attention_spec as spec
from attngen.spec import tables as spec_tables
from attngen.spec.attention_spec import load_placed, load_specs
from attngen.spec.tables import LIST_LIMIT, PRODUCT_LIMIT, REASON_LIMIT, WORD_CHARACTERS

HUNDRED = ", ".join(map(str, range(1, 101)))
ONE_LIMIT = f"[[kernel]]\nhead_dim = [{HUNDRED}]\nhead_dim_v = [{HUNDRED}]\n"  # 10^4 specs
DEEP = ".".join(["a"] * 100_000)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def reasons_of(*paths: Path) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        load_placed(paths)
    return caught.value.reasons


@pytest.fixture
def makes_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any spec that is made fails the test: its time and memory are what the limits are for."""

    def fail(*_: object) -> None:
        raise AssertionError("a spec was made")

    monkeypatch.setattr(spec, "from_data", fail)


@pytest.mark.usefixtures("makes_no_spec")
@pytest.mark.parametrize("tables", [2, 100])
def test_products_of_all_tables_of_a_file_have_one_limit(tmp_path: Path, tables: int) -> None:
    (reason,) = reasons_of(write(tmp_path / "many.toml", ONE_LIMIT * tables))
    assert f"make {tables * PRODUCT_LIMIT} specs; at most {PRODUCT_LIMIT}" in reason


@pytest.mark.usefixtures("makes_no_spec")
def test_product_of_one_table_is_refused_with_its_line(tmp_path: Path) -> None:
    text = f"\n{ONE_LIMIT}dtype = ['bf16', 'fp16']\n"
    (reason,) = reasons_of(write(tmp_path / "large.toml", text))
    assert "large.toml, line 2: kernel 1: its lists make 20000 specs" in reason


def test_products_of_all_files_of_a_command_have_one_limit(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.toml", ONE_LIMIT) for n in range(2)]
    assert len(load_placed(files[:1])) == PRODUCT_LIMIT
    (reason,) = reasons_of(*files)
    assert "1.toml" in reason and "0 are left beside other files" in reason


@pytest.mark.parametrize(
    "text",
    [
        f"{DEEP} = 1\n",
        f"[{DEEP}]\n",
        f"[[{DEEP}]]\n",
        f"x = [{{ {DEEP} = 1 }}]\n",
        f"x = 1 # a comment\n{DEEP} = 1\n",
        f"x = '''a'''''\n{DEEP} = 1\n",  # a string that ends in quotes of its own
        f'x = """\\"""a""""\n{DEEP} = 1\n',
        f"x = 1.5\n{' . '.join(['a'] * 100_000)} = 1\n",
        '"".' * 100_000 + "a = 1\n",
        "'a.b' . " * KEY_LIMIT + "a = 1\n",
        f"x = '#'\n{DEEP} = 1\n",
        f"x = 1\r\n{DEEP} = 1\r\n",
    ],
    ids=lambda text: text[:12],
)
@pytest.mark.timeout(30)
def test_deep_key_is_refused_before_it_is_parsed(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toml_text.tomllib, "loads", lambda _: pytest.fail("it was parsed"))
    (reason,) = reasons_of(write(tmp_path / "deep.toml", text))
    assert "deep.toml: a key of more than" in reason


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (f"# {'a.' * 99}\nx = 1\n", {"x": 1}),
        (f'x = "{"a." * 99}"\n', {"x": "a." * 99}),
        (f"x = '{'a.' * 99}'\n", {"x": "a." * 99}),
        (f'x = """\n{"a." * 99} = 1\n"""\n', {"x": f"{'a.' * 99} = 1\n"}),
        (f"x = [{'1.5, ' * 99}]\n", {"x": [1.5] * 99}),
        (f'x = ["{"a." * 99}\\"b.", 1.5]\n', {"x": [f'{"a." * 99}"b.', 1.5]}),
        ("a.b.c.d.e.f.g.h = 1\n", {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}}),
        ("".join(f"a{n}.b = 1\n" for n in range(99)), {f"a{n}": {"b": 1} for n in range(99)}),
    ],
    ids=lambda each: each[:12] if isinstance(each, str) else "",
)
def test_dots_that_make_no_deep_key_are_read(text: str, data: dict[str, object]) -> None:
    assert parse(text).data == data


@pytest.mark.parametrize(
    "text",
    ['x = "' + '\\"""' * 400_000, "x = " + '"' * 1_000_000, "'" * 1_000_000, '"""\\' * 400_000],
    ids=["escapes", "quotes", "apostrophes", "openings"],
)
@pytest.mark.timeout(30)
def test_strings_that_do_not_end_take_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse(text)


def test_file_of_too_many_bytes_is_refused_unread(tmp_path: Path) -> None:
    text = b"# " + b"x" * toml_text.BYTE_LIMIT
    (reason,) = reasons_of(write(tmp_path / "large.toml", text))
    assert f"large.toml: more than {toml_text.BYTE_LIMIT} bytes" in reason
    (reason,) = reasons_of(Path("/dev/zero"))
    assert "/dev/zero: not a regular file" in reason


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"name = '{'n' * 201}'\n{ONE_LIMIT[11:]}", f"more than {WORD_CHARACTERS} characters"),
        (f"head_dim = 64\nmask = ['{'n' * 201}']\n", f"more than {WORD_CHARACTERS} characters"),
        (f"head_dim = 64\narch = {['sm_90a'] * 33}\n", f"more than {LIST_LIMIT} values"),
        (f"head_dim = 0x{'f' * 50_000}\n", "head_dim: expected 64 bits, got a long int"),
        (f"head_dim = [0x{'f' * 50_000}]\nname = 'x'\n", "expected 64 bits, got a long int"),
        (f"head_dim = 64\n{'k' * 100_000} = 1\n", "unknown key 'kkkk"),
        (f"head_dim = 64\nwindow = '{'w' * 200}'\n", "got 'wwww"),
        (f"{'k' * 100_000} = 1\n" * 2, "(at line 3, column"),
        (f"[{'k' * 100_000}]\n" * 2, "(at line 3, column"),
    ],
    ids=lambda each: each[:16],
)
def test_long_words_and_numbers_are_refused_in_short(tmp_path: Path, text: str, word: str) -> None:
    (reason,) = reasons_of(write(tmp_path / "long.toml", f"[[kernel]]\n{text}"))
    assert word in reason and len(reason) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"[table{n}]\n" for n in range(100_000)),
        "[[kernel]]\n" + "".join(f"key{n} = 1\n" for n in range(100_000)),
        "".join(f"[[kernel]]\nkey{n} = 1\n" for n in range(9_000)),
        "[[kernel]]\nhead_dim = [" + ", ".join(f"'{n}'" for n in range(9_000)) + "]\n",
    ],
    ids=["tables", "keys", "keys of tables", "values"],
)
@pytest.mark.timeout(60)
def test_reasons_are_no_more_than_anybody_reads(tmp_path: Path, text: str) -> None:
    *reasons, last = reasons_of(write(tmp_path / "wrong.toml", text))
    assert len(reasons) == REASON_LIMIT and last.endswith("what else is wrong is left out")


def test_mistake_in_the_defaults_is_said_once(tmp_path: Path) -> None:
    text = "[defaults]\nmaks = 'causal'\nwindow = 7\n" + "[[kernel]]\nhead_dim = 64\n" * 3
    name, value = reasons_of(write(tmp_path / "defaults.toml", text))
    assert "line 2: defaults: unknown key 'maks'; did you mean 'mask'?" in name
    assert "line 3: defaults: window: expected bool" in value


LINES = """\
[defaults]
dtype = "bf16"  # of all
"mask" = '''
[[kernel]]
'''

[[kernel]]
head_dim = [
  64,
]
window = "no"
[[ "kernel" ]]
mask = 1
kernels = { a = 1 }
"""


def test_every_reason_has_the_line_of_its_key_or_table(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.toml", LINES)
    assert [reason.removeprefix(f"{path}, ").partition(";")[0] for reason in reasons_of(path)] == [
        "line 14: kernel 2: unknown key 'kernels'",
        "line 11: kernel 1: window: expected bool, got 'no'",
        "line 12: kernel 2: missing fields ['head_dim']",
        "line 13: kernel 2: mask: expected str, got 1",
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("kernel = [\n {head_dim = '64'}]\n", "line 1: kernel 1: head_dim"),
        ("x = 1\nkernel = 3\n", "line 2: kernels must be tables"),
        ("x = 1\ndefaults = 3\n", "line 2: defaults must be a table"),
        ("[[kernel]]\nhead_dim = 64\n[kernels]\n", "line 3: unknown table 'kernels'"),
        ("[[kernel]]\nhead_dim = 64\n[[kernel]]\nhead_dim = }\n", "(at line 4, column 12)"),
        (
            "[[kernel]]\nname = 'a'\nhead_dim = 1\n[[kernel]]\nname = 'a'\nhead_dim = 2\n",
            "line 5: several kernels are named 'a'",
        ),
        ("kernel = [{head_dim = 1}]\ndefaults = {mask = 1}\n", "line 2: defaults: mask"),
        ("[defaults]\nmask = 'none'\n[[kernel]]\nhead_dim = 1\nmask.x = 1\n", "line 5: kernel 1"),
    ],
)
def test_reason_has_a_line_however_tables_are_written(
    tmp_path: Path, text: str, place: str
) -> None:
    assert any(place in reason for reason in reasons_of(write(tmp_path / "x.toml", text)))


@pytest.mark.parametrize(
    ("key", "meant"),
    [("head_dims", "head_dim"), ("windw", "window"), ("Mask", "mask"), ("soft_cap", "softcap")],
)
def test_unknown_key_is_told_the_one_that_it_may_mean(tmp_path: Path, key: str, meant: str) -> None:
    text = f"[[kernel]]\nhead_dim = 64\n{key} = 1\n"
    (reason,) = reasons_of(write(tmp_path / "x.toml", text))
    assert reason.endswith(f"line 3: kernel 1: unknown key {key!r}; did you mean {meant!r}?")


def test_unknown_key_like_none_is_told_all(tmp_path: Path) -> None:
    text = "[[kernel]]\nhead_dim = 64\nqqqq = 1\n"
    (reason,) = reasons_of(write(tmp_path / "x.toml", text))
    assert "known: head_dim, head_dim_v, dtype" in reason and "did you mean" not in reason


def test_limits_leave_room_for_large_spec_files(tmp_path: Path) -> None:
    """Two thousand tables, each with a name and a few fields."""
    text = "".join(
        f'[[kernel]]\nname = "layer-{n}"\nhead_dim = 128\nmask = "causal"\nwindow = true\n'
        for n in range(2000)
    )
    assert len(load_specs(write(tmp_path / "model.toml", text))) == 2000
    assert spec_tables.PRODUCT_LIMIT >= 10_000
