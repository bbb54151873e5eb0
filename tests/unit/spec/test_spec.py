"""Specs: from a file and from a call; what a wrong file is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import attngen
from attngen.errors import SpecError
from attngen.ship.lookup import check_complete
from attngen.spec.attention_spec import AttentionSpec, checked, dtype_name, load_specs, parse_specs


def load(folder: Path, text: str) -> tuple[AttentionSpec, ...]:
    path = folder / "specs.toml"
    path.write_text(text)
    return load_specs(path)


def reasons_of(text: str, folder: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load(folder, text)
    assert str(folder) in str(caught.value), "the error does not name the file"
    return str(caught.value)


def tensor(*shape: int, dtype: str = "torch.bfloat16") -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=dtype)


def test_load_specs_one_table_takes_the_defaults_of_the_class(tmp_path: Path) -> None:
    assert load(tmp_path, "[[kernel]]\nhead_dim = 64\n") == (AttentionSpec(head_dim=64),)


def test_load_specs_defaults_table_is_overridden_by_a_kernel(tmp_path: Path) -> None:
    text = (
        '[defaults]\nmask = "causal"\ndtype = "fp16"\narch = ["sm_90a"]\n'
        '[[kernel]]\nhead_dim = 64\n[[kernel]]\nhead_dim = 128\nmask = "none"\n'
    )
    assert load(tmp_path, text) == (
        AttentionSpec(head_dim=64, mask="causal", dtype="fp16"),
        AttentionSpec(head_dim=128, mask="none", dtype="fp16"),
    )


def test_load_specs_lists_are_products_with_names_that_differ(tmp_path: Path) -> None:
    text = '[[kernel]]\nname = "k"\nhead_dim = [64, 128]\nmask = ["none", "causal"]\n'
    specs = load(tmp_path, text)
    assert [(spec.head_dim, spec.mask) for spec in specs] == [
        (64, "none"),
        (64, "causal"),
        (128, "none"),
        (128, "causal"),
    ]
    names = ["k-64-none", "k-64-causal", "k-128-none", "k-128-causal"]
    assert [spec.name for spec in specs] == names


def test_load_specs_product_of_a_switch_is_named_by_it(tmp_path: Path) -> None:
    specs = load(tmp_path, '[[kernel]]\nname = "k"\nhead_dim = 64\nsoftcap = [true, false]\n')
    assert [spec.name for spec in specs] == ["k-softcap", "k-no_softcap"]


def test_load_specs_list_in_defaults_is_a_product_too(tmp_path: Path) -> None:
    specs = load(tmp_path, '[defaults]\ndtype = ["bf16", "fp16"]\n[[kernel]]\nhead_dim = 64\n')
    assert [spec.dtype for spec in specs] == ["bf16", "fp16"]


def test_load_specs_directions_and_arch_are_values_not_products(tmp_path: Path) -> None:
    text = '[[kernel]]\nhead_dim = 64\ndirections = ["fwd", "bwd"]\narch = ["sm_80", "sm_90a"]\n'
    (spec,) = load(tmp_path, text)
    assert spec.directions == ("fwd", "bwd") and spec.arch == ("sm_80", "sm_90a")


def test_load_specs_single_name_stays_as_it_is(tmp_path: Path) -> None:
    (spec,) = load(tmp_path, '[[kernel]]\nname = "mine"\nhead_dim = 64\n')
    assert spec.name == "mine" and spec.title == "mine"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[kernel]]\nhead_dims = 64\n", ("head_dims", "kernel 1")),
        ('[[kernel]]\nhead_dim = "64"\n', ("head_dim", "int", "'64'")),
        ("[[kernel]]\nhead_dim = 64.0\n", ("head_dim", "int")),
        ("[[kernel]]\nhead_dim = true\n", ("head_dim", "int")),
        ("[[kernel]]\nhead_dim = 64\nwindow = 128\n", ("window", "bool", "window = true")),
        ('[[kernel]]\nhead_dim = 64\ndirections = "fwd"\n', ("directions", "list")),
        ('[[kernel]]\nname = "x"\nmask = "causal"\n', ("kernel x", "missing", "head_dim")),
        ("[[kernel]]\nhead_dim = [64, 1.5]\n", ("head_dim", "1.5")),
        ("", ("no [[kernel]]",)),
        ("[defaults]\nhead_dim = 64\n", ("no [[kernel]]",)),
        ("[kernels]\nhead_dim = 64\n", ("'kernels'", "[[kernel]]")),
        ("defaults = 3\n[[kernel]]\nhead_dim = 64\n", ("defaults", "table")),
        ("kernel = 3\n", ("[[kernel]]",)),
        ("kernel = [1]\n", ("[[kernel]]",)),
        ("[kernel]\nhead_dim = 64\n", ("[[kernel]]",)),
        ("[[kernel]\n", ("specs.toml",)),
        # An empty list would silently build nothing.
        ("[[kernel]]\nhead_dim = []\n", ("head_dim",)),
    ],
)
def test_load_specs_wrong_file_is_refused_with_the_place(
    text: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    message = reasons_of(text, tmp_path)
    assert all(part in message for part in parts), message


def test_load_specs_mistakes_in_many_tables_are_all_reported(tmp_path: Path) -> None:
    text = '[nonsense]\n[[kernel]]\nhead_dims = 1\n[[kernel]]\nname = "b"\nhead_dim = "64"\n'
    message = reasons_of(text, tmp_path)
    parts = ("'nonsense'", "'head_dims'", "kernel 1", "kernel b", "'64'")
    assert [part for part in parts if part not in message] == []


def test_load_specs_mistakes_in_one_table_are_all_reported(tmp_path: Path) -> None:
    message = reasons_of('[[kernel]]\nhead_dim = "64"\nwindow = 3\nmask = 7\n', tmp_path)
    parts = ("'64'", "got 3", "got 7")
    assert [part for part in parts if part not in message] == []


def test_load_specs_repeated_name_is_refused(tmp_path: Path) -> None:
    text = '[[kernel]]\nname = "a"\nhead_dim = 64\n[[kernel]]\nname = "a"\nhead_dim = 128\n'
    assert "'a'" in reasons_of(text, tmp_path)


def test_load_specs_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nowhere"):
        load_specs(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="binary"):
        load_specs(tmp_path / "binary.toml")


def test_parse_specs_same_mistake_in_a_product_is_reported_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_specs({"kernel": [{"head_dim": [64, 128], "colour": "red"}]}, "here")
    assert len(caught.value.reasons) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": (1024, 0)}, ["window: expected bool", "each call gives the value"]),
        ({"softcap": 30.0, "dropout": 0.1}, ["softcap, dropout = true", "bool, got 0.1"]),
        ({"head_dim": 64.0}, ["head_dim: expected int"]),
        ({"dtype": object}, ["dtype: expected str"]),
        ({"mask": None, "layout": None}, ["mask: expected str", "layout: expected str"]),
        ({"directions": "fwd"}, ["directions: expected a list, got 'fwd'"]),
    ],
    ids=str,
)
def test_build_and_require_refuse_a_spec_with_fields_of_wrong_types(fields, words) -> None:
    spec = AttentionSpec(**{"head_dim": 64, **fields})
    for refuse in (attngen.build, lambda spec: check_complete([], [spec])):
        with pytest.raises(SpecError) as refusal:
            refuse(spec)
        assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("spec", [None, "specs.toml", {"head_dim": 64}])
def test_build_of_what_is_no_spec_says_so(spec: object) -> None:
    with pytest.raises(SpecError, match="is no AttentionSpec; attngen.load_specs"):
        attngen.build(spec)  # type: ignore[arg-type]


def test_checked_takes_lists_for_tuples() -> None:
    spec = AttentionSpec(head_dim=64, directions=["fwd", "bwd"])  # type: ignore[arg-type]
    assert checked(spec) == AttentionSpec(head_dim=64, directions=("fwd", "bwd"))


def test_title_without_a_name_says_what_differs() -> None:
    title = AttentionSpec(head_dim=96, mask="causal", window=True).title
    assert title == "head_dim=96 mask=causal window=True"


def test_from_call_plain_call_needs_the_plain_spec() -> None:
    q, k = tensor(2, 100, 8, 64), tensor(2, 200, 4, 64)
    assert AttentionSpec.from_call(q, k, k) == AttentionSpec(head_dim=64)


def test_from_call_other_head_dim_and_dtypes_are_named() -> None:
    q, k, v = tensor(2, 100, 8, 192), tensor(2, 200, 4, 192), tensor(2, 200, 4, 128)
    assert AttentionSpec.from_call(q, k, v).head_dim_v == 128
    half = tensor(2, 100, 8, 192, dtype="torch.float16")
    eighth = tensor(2, 200, 4, 192, dtype="torch.float8_e4m3fn")
    spec = AttentionSpec.from_call(half, eighth, eighth)
    assert (spec.dtype, spec.kv_dtype) == ("fp16", "e4m3")


def test_from_call_fp8_names_the_dtypes_that_were_asked_for() -> None:
    q, k = (tensor(2, 100, 8, 64, dtype=f"torch.float8_{x}") for x in ("e4m3fn", "e5m2"))
    assert AttentionSpec.from_call(q, q, q) == AttentionSpec(head_dim=64, dtype="e4m3")
    spec = AttentionSpec.from_call(q, k, k, out_dtype="torch.float16", return_amax=True)
    assert (spec.dtype, spec.kv_dtype, spec.out_dtype) == ("e4m3", "e5m2", "fp16")


@pytest.mark.parametrize(
    ("layout", "operands"),
    [
        ("bs3hd", (tensor(2, 100, 3, 8, 64), None, None)),
        ("bshd_bs2hd", (tensor(2, 100, 8, 64), tensor(2, 100, 2, 8, 64), None)),
    ],
)
def test_from_call_packed_tensors_give_one_head_dim(layout: str, operands: tuple) -> None:
    spec = AttentionSpec.from_call(*operands, layout=layout)
    assert spec == AttentionSpec(head_dim=64, layout=layout)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"mask": "causal_bottom_right"}, {"mask": "causal_bottom_right"}),
        ({"window": (-1, -1)}, {}),
        ({"window": (None, None)}, {}),
        ({"window": (0, -1)}, {"window": True}),
        ({"window": (None, 5)}, {"window": True}),
        ({"bias": tensor(1, 1, 1, 1)}, {"bias": "post_scale"}),
        ({"bias": tensor(1), "bias_type": "pre_scale"}, {"bias": "pre_scale"}),
        ({"bias_type": "pre_scale"}, {}),
        ({"alibi_slopes": True}, {"alibi": True}),
        ({"bias_type": "alibi"}, {"alibi": True}),
        ({"softcap": 30.0}, {"softcap": True}),
        ({"score_mod": print}, {"score_mod": True}),
        ({"mask_mod": print}, {"mask_mod": True}),
        ({"block_mask": object()}, {"mask_mod": True}),
        ({"softmax": "off_by_one"}, {"softmax": "off_by_one"}),
        ({"dropout_p": 0.1}, {"dropout": True}),
        ({"return_max_logit": True}, {"return_max_logit": True}),
        ({"deterministic": True}, {"deterministic": True}),
        ({"deterministic": None}, {}),
        ({"softmax_scale": 2.0, "bottom_right": True, "return_lse": True}, {}),
    ],
)
def test_from_call_each_argument_switches_its_feature_on(arguments: dict, expected: dict) -> None:
    q = tensor(2, 100, 8, 64)
    assert AttentionSpec.from_call(q, q, q, **arguments) == AttentionSpec(head_dim=64, **expected)


@pytest.mark.parametrize(
    ("operands", "layout"),
    [
        ((tensor(2, 100, 64),) * 3, "bshd"),
        ((tensor(2, 100, 8, 64), None, None), "bshd"),
        ((tensor(2, 100, 8, 64), None, None), "bs3hd"),
        ((tensor(2, 100, 8, 64),) * 3, "dhsb"),
    ],
)
def test_from_call_layout_that_does_not_fit_is_refused(operands: tuple, layout: str) -> None:
    with pytest.raises(SpecError, match=layout):
        AttentionSpec.from_call(*operands, layout=layout)


def test_dtype_name_known_ones_are_short_and_others_kept() -> None:
    assert dtype_name("torch.bfloat16") == "bf16"
    assert dtype_name("torch.int32") == "torch.int32"
