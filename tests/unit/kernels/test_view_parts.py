"""The parts of views: what kernels' templates are told of fragments, tensors and tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.fragments import features
from attngen.io import files
from attngen.kernels.base import Axis
from attngen.kernels.fill import emit_fragment, emit_fragments
from attngen.kernels.uses import FragmentUse, uses_of
from attngen.kernels.view import (
    FragmentView,
    ScoreListView,
    Value,
    fragment_view,
    mask_list_view,
    score_list_view,
    tensor_view,
)
from attngen.kernels.view_axis import axis_view
from attngen.spec.problem import Problem

PROBLEM = Problem(
    direction="fwd",
    dtype_q="bf16",
    dtype_kv="bf16",
    dtype_o="bf16",
    head_dim_qk=64,
    head_dim_v=128,
    masks=(),
    scores=(),
    softmax="vanilla",
    q_seq="packed",
    kv_seq="used",
    kv_fetch="tma",
    kv_iter="range",
)
AXIS = Axis(
    rows=128, group_heads=6, group_bytes=3840 * 100, sums=False, follows=False, tail_share=4
)


def uses(**facts: object) -> dict[str, list[FragmentUse]]:
    return uses_of(replace(PROBLEM, **facts), features.scan())  # type: ignore[arg-type]


def scores(*names: str, masks: tuple[str, ...] = (), **wanted: bool) -> ScoreListView:
    found = uses(scores=names, masks=masks)
    view = score_list_view(found["score"], found["mask"], **wanted)  # type: ignore[arg-type]
    assert view is not None
    return view


def test_fragment_views_name_what_fills_a_struct() -> None:
    found = uses(scores=("alibi",))
    slopes = Value("alibi_slopes", ("batch", "head"))
    assert fragment_view(found["score"][0]) == FragmentView("AlibiScore", "alibi", (slopes,))
    lengths = [value.parameter for value in fragment_view(found["kv_seq"][0]).values]
    assert lengths == ["kv_len", "kv_lengths", "kv_least"]


def test_mask_lists_are_bounded_where_one_of_their_masks_is() -> None:
    assert mask_list_view([]) == mask_list_view(uses()["mask"])
    assert not mask_list_view([]).bounds_left
    causal = mask_list_view(uses(masks=("causal",))["mask"])
    assert (causal.bounds_left, causal.bounds_right) == (False, True)
    both = mask_list_view(uses(masks=("causal", "window"))["mask"])
    assert (both.bounds_left, both.bounds_right) == (True, True)
    assert [mask.name for mask in both.fragments] == ["causal", "window"]


def test_score_lists_of_nothing_are_none() -> None:
    assert score_list_view((), ()) is None


def test_scores_in_units_of_products_convert_what_they_read() -> None:
    """ALiBi's slopes are in units of scaled scores, so that they are divided by the unit."""
    alibi = scores("alibi")
    assert [value.factor for value in alibi.scores[0].values] == ["per_unit"]
    assert (alibi.reads_params, alibi.reads_tensors) == (True, True)
    assert (alibi.reads_unit, alibi.reads_per_unit) == (True, True)
    scaled = scores("post_scale_bias", "alibi", scales=True)
    assert [value.factor for value in scaled.scores[1].values] == [""]
    assert not scaled.reads_per_unit


def test_scores_that_take_scaled_ones_are_scaled_before_them_else_in_the_end() -> None:
    before = scores("softcap", "post_scale_bias", scales=True)
    assert [score.meets_scaled for score in before.scores] == [False, True]
    assert not before.scales_result
    last = scores("softcap", scales=True)
    assert [score.meets_scaled for score in last.scores] == [False]
    assert last.scales_result
    neither = scores("softcap", "post_scale_bias")
    assert not any(score.meets_scaled for score in neither.scores)
    assert not neither.scales_result


def test_scores_scale_tiles_unless_they_are_scaled_themselves() -> None:
    bias = scores("post_scale_bias")
    assert (bias.unit, bias.unit_value, bias.scales_tile) == ("tile_unit", "per_unit", True)
    scaled = scores("post_scale_bias", scales=True)
    assert (scaled.unit, scaled.unit_value, scaled.scales_tile) == ("unit", "unit", False)
    before = scores("pre_scale_bias")
    assert (before.unit, before.unit_value, before.reads_tile) == ("", "", True)
    assert bias.scores[0].values == ()
    assert (scores("alibi").unit, scores("alibi").reads_tile) == ("", False)


def test_scores_that_add_alone_have_no_derivative() -> None:
    assert not scores("alibi", gradient=True).differentiates
    assert scores("softcap", "alibi", gradient=True).differentiates
    assert not scores("softcap").differentiates


def test_scores_have_a_cheaper_form_where_the_first_has() -> None:
    bent = scores("softcap", "alibi")
    assert bent.small == "softcap"
    assert [score.name for score in bent.after_small] == ["alibi"]
    assert (scores("alibi").small, scores("alibi").after_small) == ("", ())


def test_scores_know_whether_a_mask_hides_what_is_past() -> None:
    assert scores("alibi", masks=("causal",)).place == "Place<true>"
    assert scores("alibi", masks=("window",)).place == "Place<false>"
    assert scores("alibi").place == "Place<false>"


@pytest.mark.parametrize(
    ("name", "sequence", "packed", "columns", "row_bytes"),
    [
        ("q", "q_sequence(p)", True, "dim_qk", 128),
        ("dq", "q_sequence(p)", True, "dim_qk", 128),
        ("d_o", "q_sequence(p)", True, "dim_v", 256),
        ("dk", "kv_sequence(p)", False, "dim_qk", 128),
        ("dv", "kv_sequence(p)", False, "dim_v", 256),
    ],
)
def test_tensor_views_have_rows_of_one_side(
    name: str, sequence: str, packed: bool, columns: str, row_bytes: int
) -> None:
    view = tensor_view(PROBLEM, name)
    assert (view.sequence, view.packed, view.dense) == (sequence, packed, False)
    assert (view.columns_parameter, view.row_bytes) == (columns, row_bytes)


def test_tensor_views_of_outputs_have_their_own_dtype() -> None:
    parts = tensor_view(replace(PROBLEM, dtype_o="fp32"), "o")
    assert (parts.word, parts.element_bytes, parts.row_bytes) == ("u32", 4, 512)
    assert tensor_view(replace(PROBLEM, dtype_o="fp32"), "dq").element_bytes == 2
    assert tensor_view(replace(PROBLEM, q_seq="dense"), "o").dense
    assert tensor_view(replace(PROBLEM, kv_fetch="gather"), "o").gathered


def test_axis_views_count_positions_by_what_they_share() -> None:
    queries = axis_view(PROBLEM, AXIS, of_queries=True)
    assert queries.positions == 1000  # of K and V: (64 + 128) columns of 2 bytes
    assert (queries.side, queries.schedule, queries.heads) == ("query", "q_schedule", "heads_q")
    assert (queries.own, queries.other) == ("q_sequence(p)", "kv_sequence(p)")
    keys = axis_view(PROBLEM, replace(AXIS, sums=True), of_queries=False, orders_few=True)
    assert keys.positions == 600  # beside float32 sums of dQ
    assert (keys.side, keys.schedule, keys.orders_few) == ("key", "kv_schedule", True)


def test_axis_views_count_8_bit_queries_twice_as_they_lie_transposed_too() -> None:
    stored = replace(PROBLEM, dtype_q="e4m3", dtype_kv="e4m3")
    summed = replace(AXIS, sums=True)
    assert axis_view(stored, AXIS, of_queries=True).positions == 2000
    assert axis_view(stored, summed, of_queries=False).positions == 600  # as of 16 bits


def test_emit_fragments_emits_a_struct_once() -> None:
    root, found = files.templates_dir(), uses(q_seq="used")
    roles = {role: found[role] for role in ("q_seq", "kv_seq", "softmax")}
    used, softmax = found["q_seq"][0].fragment, found["softmax"][0].fragment
    assert emit_fragments(root, roles) == (emit_fragment(root, used), emit_fragment(root, softmax))
