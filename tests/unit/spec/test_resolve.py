"""Resolve: from a spec to problems, or every reason why not and the nearest spec that is legal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from attngen.errors import SpecError
from attngen.fragments import features
from attngen.spec import layouts
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import find_violations, nearest, resolve

KNOWN = features.scan()
DTYPES = ("bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2", "int8", "")
MASKS = (
    *("none", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"),
    *("window", "none_bottom_right", "padding_causal_bottom_right", "", "x"),
)
SPECS = st.builds(
    AttentionSpec,
    head_dim=st.integers(-8, 600),
    head_dim_v=st.none() | st.integers(-8, 600),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.none() | st.sampled_from(DTYPES),
    out_dtype=st.none() | st.sampled_from(DTYPES),
    layout=st.sampled_from((*layouts.NAMES, *layouts.FORMATS, "dhsb")),
    mask=st.sampled_from(MASKS),
    window=st.booleans(),
    attn_mask=st.booleans(),
    seqused=st.booleans(),
    decode=st.booleans(),
    bias=st.sampled_from(("none", "post_scale", "pre_scale", "alibi")),
    alibi=st.booleans(),
    softcap=st.booleans(),
    score_mod=st.booleans(),
    mask_mod=st.booleans(),
    softmax=st.sampled_from(("vanilla", "off_by_one", "learnable", "x")),
    dropout=st.booleans(),
    return_max_logit=st.booleans(),
    deterministic=st.booleans(),
    directions=st.lists(st.sampled_from(("fwd", "bwd", "up"))).map(tuple),
    arch=st.lists(st.sampled_from(("sm_90a", "sm_80", "sm_75"))).map(tuple),
    name=st.none() | st.just("mine"),
)


def test_resolve_plain_spec_is_the_plain_problem(make_problem) -> None:
    assert resolve(AttentionSpec(head_dim=64), KNOWN) == (make_problem(64),)


def test_resolve_every_choice_reaches_the_problem(make_problem) -> None:
    spec = AttentionSpec(
        head_dim=192, head_dim_v=128, dtype="fp16", out_dtype="fp32", mask="causal", window=True
    )
    expected = make_problem(192, 128, ("causal", "window"), "fp16", out="fp32")
    assert resolve(spec, KNOWN) == (expected,)


@pytest.mark.parametrize(
    ("fields", "kv_dtype", "out_dtype"),
    [
        ({}, "e4m3", "bf16"),
        ({"dtype": "e5m2"}, "e5m2", "bf16"),
        ({"kv_dtype": "e5m2"}, "e5m2", "bf16"),
        ({"dtype": "e5m2", "kv_dtype": "e4m3", "out_dtype": "fp16"}, "e4m3", "fp16"),
        ({"out_dtype": "e4m3"}, "e4m3", "e4m3"),
        ({"out_dtype": "e5m2"}, "e4m3", "e5m2"),
    ],
)
def test_resolve_fp8_dtypes_reach_the_problem(fields, kv_dtype, out_dtype) -> None:
    spec = AttentionSpec(**{"head_dim": 128, "head_dim_v": 16, "dtype": "e4m3", **fields})
    (problem,) = resolve(spec, KNOWN)
    dtypes = (problem.dtype_q, problem.dtype_kv, problem.dtype_o)
    assert dtypes == (spec.dtype, kv_dtype, out_dtype)


SEQUENCES = {
    ("bshd", "causal", False): ("dense", "dense"),
    ("sb3hd", "none", False): ("dense", "dense"),
    ("bhsd", "padding", False): ("used", "used"),
    ("bshd_bs2hd", "padding_causal_bottom_right", False): ("used", "used"),
    ("bs3hd", "causal", True): ("used", "used"),
    ("thd", "none", False): ("packed", "packed"),
    ("t3hd", "padding_causal", False): ("packed", "packed"),
    ("thd_sbhd_sbhd", "none", False): ("packed", "dense"),
    ("thd_bshd_bshd", "none", True): ("packed", "used"),
}


@pytest.mark.parametrize(("layout", "mask", "seqused"), SEQUENCES)
def test_resolve_layout_and_lengths_choose_how_sequences_are_found(layout, mask, seqused) -> None:
    spec = AttentionSpec(head_dim=64, layout=layout, mask=mask, seqused=seqused)
    (problem,) = resolve(spec, KNOWN)
    wanted = SEQUENCES[layout, mask, seqused]
    assert (problem.q_seq, problem.kv_seq) == wanted
    assert problem.varlen == (wanted != ("dense", "dense"))
    assert problem.masks == (("causal",) if "causal" in mask else ())


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("head_dim", 24, 32),
        ("head_dim", 8, 16),
        ("head_dim", 272, 256),
        ("head_dim_v", 8, 16),
        ("kv_dtype", "bf16", None),
        ("out_dtype", "fp32", None),
        ("softmax", "smooth", "vanilla"),
        ("grad_dtype", "fp32", None),
        ("d_o_dtype", "bf16", None),
        ("backward", "fp16", None),
    ],
)
def test_resolve_fp8_violation_is_refused_with_the_nearest_value(field, value, legal) -> None:
    spec = AttentionSpec(**{"head_dim": 64, "dtype": "e4m3", field: value})
    assert [violation.field for violation in find_violations(spec, KNOWN)] == [field]
    assert getattr(nearest(spec, KNOWN), field) == legal


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "sbhd"},
        {"layout": "bhsd_bhsd_bhsd"},
        {"mask": "causal_bottom_right"},
        {"name": "mine"},
        {"deterministic": True},
        {"kv_dtype": "bf16"},
        {"out_dtype": "bf16"},
        {"head_dim_v": 64},
    ],
)
def test_resolve_run_time_choices_share_one_problem(change: dict) -> None:
    """Layouts and alignments are arguments of a launch, no reason for another kernel."""
    spec = AttentionSpec(head_dim=64, mask="causal")
    assert resolve(replace(spec, **change), KNOWN) == resolve(spec, KNOWN)


@pytest.mark.parametrize(
    ("fields", "dims"),
    [
        ({"head_dim": 1}, (16, 16)),
        ({"head_dim": 68}, (80, 80)),
        ({"head_dim": 128, "head_dim_v": 65}, (128, 80)),
        ({"head_dim": 255, "head_dim_v": 3}, (256, 16)),
        ({"head_dim": 72, "gather": True}, (80, 80)),
        ({"head_dim": 128, "gather": True}, (128, 128)),
    ],
)
def test_resolve_rows_that_threads_copy_have_tiles_of_whole_steps(fields, dims) -> None:
    spec = AttentionSpec(**fields, directions=("fwd", "bwd"))
    for problem in resolve(spec, KNOWN):
        assert problem.gather and problem.kv_fetch == "gather"
        assert (problem.head_dim_qk, problem.head_dim_v) == dims
        assert problem.label.endswith("_gather")


def test_resolve_head_dims_of_one_step_share_kernels() -> None:
    found = {resolve(AttentionSpec(head_dim=d), KNOWN) for d in (113, 121, 127)}
    assert found == {resolve(AttentionSpec(head_dim=128, gather=True), KNOWN)}


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "e4m3"},
        {"layout": "paged_kv_bshd_bshd_bshd"},
        {"decode": True},
    ],
)
def test_resolve_gather_of_what_the_copy_engine_alone_reads_is_refused(fields) -> None:
    spec = AttentionSpec(head_dim=64, gather=True, **fields)
    assert [violation.field for violation in find_violations(spec, KNOWN)] == ["gather"]
    assert nearest(spec, KNOWN) == AttentionSpec(head_dim=64, **fields)


@pytest.mark.parametrize("deterministic", [False, True])
def test_resolve_a_problem_each_direction_and_order_matters_backward_only(
    deterministic, make_problem
) -> None:
    spec = AttentionSpec(head_dim=64, deterministic=deterministic, directions=("bwd", "fwd"))
    backward = make_problem(64, direction="bwd", deterministic=deterministic)
    assert resolve(spec, KNOWN) == (backward, make_problem(64))


def test_resolve_a_windowed_backward_has_a_second_problem_unless_an_order_is_asked_for() -> None:
    spec = AttentionSpec(head_dim=64, window=True, directions=("fwd", "bwd"))
    forward, *backwards = resolve(spec, KNOWN)
    plain, ordered = forward.backward(), forward.backward(True)
    assert backwards == [plain, ordered] == [*plain.orders()]
    assert resolve(replace(spec, deterministic=True), KNOWN) == (forward, ordered)


@pytest.mark.parametrize(
    ("fields", "mask", "dropout"),
    [
        ({"mask": "arbitrary", "attn_mask": True}, True, False),
        ({"mask": "causal", "attn_mask": True, "dropout": True}, True, True),
        ({"mask": "arbitrary"}, True, False),
        ({"dropout": True}, False, True),
    ],
)
def test_resolve_bits_and_dropout_reach_the_problem(fields, mask, dropout) -> None:
    for problem in resolve(AttentionSpec(head_dim=64, directions=("fwd", "bwd"), **fields), KNOWN):
        assert (problem.attn_mask, problem.dropout) == (mask, dropout)
        assert problem.masks == (("causal",) if fields.get("mask") == "causal" else ())
        assert ("arbitrary" in problem.label, "dropout" in problem.label) == (mask, dropout)


def test_resolve_dropout_of_fp8_reaches_both_directions() -> None:
    fields = {"head_dim": 64, "dtype": "e4m3", "attn_mask": True, "dropout": True}
    forward, backward = resolve(AttentionSpec(**fields, directions=("fwd", "bwd")), KNOWN)
    assert (forward.dropout, forward.attn_mask) == (backward.dropout, backward.attn_mask)
    assert forward.dropout and forward.eight_bit


WIDENED = {"head_dim": 64, "kv_dtype": "e4m3", "decode": True}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", ["bshd", "paged_kv_bshd_bshd_bshd", "paged_kv_thd_sbhd_sbhd"])
def test_resolve_8_bit_keys_beside_16_bit_queries_reach_the_problem(dtype, kv_dtype, layout):
    spec = AttentionSpec(64, dtype=dtype, kv_dtype=kv_dtype, layout=layout, decode=True)
    (problem,) = resolve(spec, KNOWN)
    assert (problem.dtype_q, problem.dtype_kv, problem.dtype_o) == (dtype, kv_dtype, dtype)
    assert problem.widens and not problem.eight_bit and f"kv_{kv_dtype}" in problem.label


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("head_dim", 72, 80),
        ("head_dim_v", 8, 16),
        ("layout", "bs3hd", "bs3hd"),
        ("dropout", True, False),
        ("attn_mask", True, False),
        ("bias", "post_scale", "none"),
        ("mask", "arbitrary", "none"),
        ("out_dtype", "fp32", None),
        ("gather", True, False),
        ("directions", ("fwd", "bwd"), ("fwd",)),
    ],
)
def test_resolve_8_bit_keys_beside_16_bit_queries_refuse_what_is_not_built(field, value, legal):
    spec = AttentionSpec(**{**WIDENED, field: value})
    assert find_violations(spec, KNOWN)
    assert getattr(nearest(spec, KNOWN), field) == legal
    assert find_violations(nearest(spec, KNOWN), KNOWN) == []


def test_resolve_backward_of_a_partial_output_is_refused() -> None:
    spec = AttentionSpec(head_dim=64, out_dtype="fp32", directions=("fwd", "bwd"))
    (violation,) = find_violations(spec, KNOWN)
    assert violation.field == "directions" and "'fp32' output" in violation.reason
    assert nearest(spec, KNOWN) == replace(spec, directions=("fwd",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"out_dtype": None}, "float32"),
        ({"seqused": True}, "lengths"),
        ({"layout": "thd"}, None),
        ({"softmax": "off_by_one"}, "sinks"),
        ({"return_max_logit": True}, "max_logit"),
    ],
    ids=str,
)
def test_resolve_output_that_joins_another_is_float32(change, reason) -> None:
    fields = {"head_dim": 64, "out_dtype": "fp32", "continues": True, **change}
    violations = find_violations(AttentionSpec(**fields), KNOWN)
    assert [x.field for x in violations] == ([] if reason is None else ["continues"])
    assert all(reason in violation.reason for violation in violations)


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("head_dim", 0, 1),
        ("head_dim_v", 513, 512),
        ("head_dim_v", -1, 1),
        ("dtype", "fp32", "bf16"),
        ("kv_dtype", "fp16", None),
        ("out_dtype", "fp16", None),
        ("out_dtype", "e4m3", None),
        ("layout", "dhsb", "bshd"),
        # No name of the semantics; with window=True the same fragment would be there twice.
        ("mask", "window", "none"),
        ("mask", "casual", "causal"),
        ("mask", "paddingcausal", "padding_causal"),
        ("layout", "bhs", "bhsd"),
        ("layout", "paged", "bshd"),
        ("softmax", "off-by-one", "off_by_one"),
        ("softmax", "smooth", "vanilla"),
        ("bias", "alibi", "none"),
        ("score_mod", True, False),
        ("mask_mod", True, False),
        ("directions", ("up", "bwd"), ("bwd",)),
        ("directions", ("up",), ("fwd",)),
        ("directions", (), ("fwd",)),
        ("arch", ("sm_75",), ("sm_90a",)),
        ("arch", ("sm_75", "sm_80"), ("sm_80",)),
        ("arch", (), ("sm_90a",)),
    ],
)
def test_resolve_one_violation_is_refused_with_the_nearest_value(field, value, legal) -> None:
    spec = AttentionSpec(**{"head_dim": 64, field: value})
    assert [violation.field for violation in find_violations(spec, KNOWN)] == [field]
    assert getattr(nearest(spec, KNOWN), field) == legal
    with pytest.raises(SpecError) as caught:
        resolve(spec, KNOWN)
    *reasons, last = caught.value.reasons
    assert len(reasons) == 1 and field in reasons[0]
    assert f"{field}={legal!r}" in last


def test_resolve_many_violations_are_all_reported() -> None:
    wrong = {"head_dim": 300, "dtype": "fp64", "layout": "dhsb", "mask": "x", "score_mod": True}
    with pytest.raises(SpecError) as caught:
        resolve(AttentionSpec(**wrong, softmax="smooth", directions=("up",)), KNOWN)
    message = str(caught.value)
    for field in (*wrong, "softmax", "direction"):
        assert field in message
    assert len(caught.value.reasons) == 8


def test_resolve_field_that_is_wrong_twice_is_changed_once() -> None:
    with pytest.raises(SpecError) as caught:
        resolve(AttentionSpec(64, kv_dtype="e4m3", dropout=True, decode=True), KNOWN)
    assert str(caught.value).count("dropout=False") == 1


@pytest.mark.parametrize(
    ("fields", "said", "legal"),
    [
        ({"mask": "window"}, "window = true", {}),
        ({"mask": "spiral"}, "'arbitrary'", {}),
        ({"dtype": "float16"}, "'fp16'", {"dtype": "fp16"}),
        ({"dtype": "torch.float8_e5m2"}, "'e5m2'", {"dtype": "e5m2"}),
        ({"dtype": "float32"}, "'bf16'", {}),
        (
            {"head_dim": 577, "head_dim_v": 512},
            "of 64 keys and values take 208 of 227 KiB",
            {"head_dim": 576, "head_dim_v": 512},
        ),
        ({"head_dim": 576}, "head_dim_v 576", {"head_dim": 576, "head_dim_v": 512}),
        (
            {"head_dim": 576, "head_dim_v": 512, "directions": ("fwd", "bwd")},
            "each of two CTAs has half of the columns of dK and dV",
            {"head_dim": 512, "head_dim_v": 512, "directions": ("fwd", "bwd")},
        ),
    ],
)
def test_refusal_says_what_was_probably_meant(fields: dict, said: str, legal: dict) -> None:
    spec = AttentionSpec(**{"head_dim": 64, **fields})
    (violation,) = find_violations(spec, features.scan())
    assert said in violation.reason
    assert nearest(spec, features.scan()) == AttentionSpec(**{"head_dim": 64, **legal})


OF_FIELDS = [x for axis in ("mask", "score") for x in KNOWN[axis].values() if not x.called]


@pytest.mark.parametrize("fragment", OF_FIELDS, ids=lambda x: x.name)
def test_fragment_that_a_field_asks_for_is_in_the_problem(fragment) -> None:
    """A fragment that `selected_by` names a field for, and that no problem has, would be left out
    without a word."""
    dtype = "e4m3" if fragment.selected_by == "scaling" else "bf16"
    spec = AttentionSpec(64, dtype=dtype, **{fragment.selected_by: fragment.switch})
    (problem,) = resolve(spec, KNOWN)
    assert fragment.name in (*problem.masks, *problem.scores)
