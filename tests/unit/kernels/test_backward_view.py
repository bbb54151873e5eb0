"""The views of a backward's kernels: each decision, where it tells kernels apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.kernels.mask_view import PairMaskView
from attngen.kernels.support.around import CONVERT, PREPARE, ROW_SUMS
from attngen.kernels.wgmma.backward.plan import (
    MAIN,
    OF_BIAS,
    OF_KEYS,
    OF_QUERIES,
    WITH_BIAS,
    WITH_SUMS,
)
from attngen.kernels.wgmma.backward.render import ROLES
from attngen.spec.problem import Problem
from tests.support.backward_kit import (
    BIAS,
    CAPPED,
    CAPPED_BIAS,
    DENSE,
    DROPOUT,
    GATHER,
    LARGE,
    LARGE_BIAS,
    MASKED,
    ORDERED,
    ORDERED_WINDOW,
    PACKED,
    SCALED_BIAS,
    SMALL,
    UNLIKE,
    WINDOW,
    headers_of,
    names_in,
    view_in,
)


@pytest.mark.parametrize(
    ("problem", "family", "facts"),
    [
        (DENSE, MAIN, set()),
        (CAPPED, MAIN, {"list", "bend", "listed"}),
        (replace(DENSE, scores=("alibi",)), MAIN, {"list", "listed"}),
        (BIAS, MAIN, {"list", "scaled_list", "tile", "added"}),
        (LARGE_BIAS, OF_QUERIES, {"list", "scaled_list", "tile", "added"}),
        (CAPPED_BIAS, OF_QUERIES, {"list", "scaled_list", "tile", "bend", "listed"}),
        (CAPPED_BIAS, OF_BIAS, {"list", "scaled_list", "tile", "bend", "listed"}),
        (BIAS, ROW_SUMS, {"scaled_list", "tile", "added"}),
    ],
)
def test_scores(problem: Problem, family: str, facts: set[str]) -> None:
    scores = view_in(problem, family).scores
    assert names_in(scores, "list", "scaled_list", "bend", "tile", "added", "listed") == facts


FUSED_FLAGS = (
    *("splits_rows", "one_sum", "held_steps", "completes", "joins_last", "deterministic"),
    *("descending", "starts_early", "own_dv", "adds_bias", "scales_ds", "skips", "draws_early"),
    *("draws_late", "packs_weights", "heads_matter", "makes_d", "splits_heads", "frees_early"),
    *("loads_score_tiles", "awaits_at_start", "sums_bias", "bias_by_block", "sums_by_key"),
)
USUAL = {
    "one_sum",
    "held_steps",
    "starts_early",
    "own_dv",
    "packs_weights",
    "splits_heads",
    "awaits_at_start",
}


@pytest.mark.parametrize(
    ("problem", "family", "more", "less"),
    [
        (DENSE, MAIN, set(), set()),
        (SMALL, MAIN, {"splits_rows", "frees_early"}, {"held_steps"}),
        (replace(SMALL, head_dim_v=48), MAIN, {"splits_rows", "frees_early"}, {"held_steps"}),
        (replace(DENSE, head_dim_v=112), MAIN, set(), {"one_sum"}),
        (WINDOW, MAIN, {"skips"}, set()),
        (replace(WINDOW, scores=("alibi",)), MAIN, {"heads_matter"}, {"splits_heads"}),
        (ORDERED, MAIN, {"deterministic"}, {"held_steps"}),
        (
            ORDERED_WINDOW,
            MAIN,
            {"deterministic", "descending", "completes", "joins_last", "skips", "makes_d"},
            {"splits_heads", "awaits_at_start"},
        ),
        (DROPOUT, MAIN, {"draws_early", "heads_matter"}, {"own_dv", "held_steps", "packs_weights"}),
        (
            replace(SMALL, dropout=True),
            MAIN,
            {"draws_late", "heads_matter", "splits_rows", "frees_early"},
            {"own_dv", "held_steps", "packs_weights", "splits_heads"},
        ),
        (CAPPED, MAIN, {"heads_matter"}, {"held_steps", "packs_weights"}),
        (
            SCALED_BIAS,
            MAIN,
            {"heads_matter", "loads_score_tiles"},
            {"own_dv", "held_steps", "splits_heads"},
        ),
        (
            SCALED_BIAS,
            WITH_BIAS,
            {"heads_matter", "loads_score_tiles", "adds_bias", "scales_ds"},
            {"own_dv", "held_steps", "splits_heads"},
        ),
        (
            SCALED_BIAS,
            WITH_SUMS,
            {"heads_matter", "loads_score_tiles", "sums_bias", "sums_by_key"},
            {"own_dv", "held_steps", "splits_heads"},
        ),
        (
            replace(SCALED_BIAS, head_dim_qk=64, head_dim_v=64),
            WITH_SUMS,
            {
                "heads_matter",
                "loads_score_tiles",
                "sums_bias",
                "sums_by_key",
                "bias_by_block",
                "splits_rows",
                "frees_early",
            },
            {"own_dv", "held_steps", "splits_heads"},
        ),
        (
            GATHER,
            MAIN,
            set(),
            {"own_dv", "held_steps", "splits_heads", "starts_early", "awaits_at_start"},
        ),
    ],
)
def test_fused(problem: Problem, family: str, more: set[str], less: set[str]) -> None:
    assert not less - USUAL and not more & USUAL
    assert names_in(view_in(problem, family), *FUSED_FLAGS) == (USUAL | more) - less


def test_fused_joins_in_the_end_but_beside_lengths_scores_and_large_blocks() -> None:
    small = replace(ORDERED_WINDOW, head_dim_qk=64, head_dim_v=64)
    alone = [
        small,
        replace(small, scores=("alibi",)),
        replace(small, kv_seq="used"),
        replace(ORDERED_WINDOW, kv_seq="used", scores=("alibi",)),
    ]
    assert all(view_in(each, MAIN).joins_last for each in alone)
    together = view_in(replace(small, kv_seq="used", scores=("alibi",)), MAIN)
    assert together.completes and not together.joins_last


def test_fused_awaits_first_what_comes_with_d() -> None:
    kept, freed = view_in(DENSE, MAIN), view_in(SMALL, MAIN)
    assert (kept.with_d.full, kept.without_d.full) == ("kDoFull", "kQFull")
    assert (freed.with_d.full, freed.without_d.full) == ("kQFull", "kDoFull")
    assert freed.with_d.ring == "q_ring"


def test_fused_loads_values_first_where_dv_has_a_place_of_its_own() -> None:
    assert [each.name for each in view_in(DENSE, MAIN).kept] == ["V", "K"]
    assert [each.name for each in view_in(DROPOUT, MAIN).kept] == ["K", "V"]


def test_fused_arrivals() -> None:
    plain = view_in(DENSE, MAIN).arrivals
    assert (plain.kept, plain.queries, plain.output_gradients, plain.loaders) == (1, 1, "1", 3)
    assert (plain.freed_output_gradients, plain.dq) == (128, 4)
    gathered = view_in(GATHER, MAIN).arrivals
    assert (gathered.kept, gathered.queries, gathered.loaders) == (32, 33, 34)
    assert gathered.output_gradients == "33"
    completing = view_in(ORDERED_WINDOW, MAIN).arrivals
    assert (completing.output_gradients, completing.dq) == ("1 + kFirstThreads", 128)
    assert view_in(SMALL, MAIN).arrivals.freed_output_gradients == 4


def test_fused_prefetches_the_maps_that_it_reads_and_writes() -> None:
    usual = ("map_q", "map_k", "map_v", "map_d_o", "map_dk", "map_dv")
    assert view_in(DENSE, MAIN).prefetched == usual
    assert view_in(ORDERED_WINDOW, MAIN).prefetched == (*usual, "map_o", "map_dq")
    assert view_in(GATHER, MAIN).prefetched == ()


@pytest.mark.parametrize(
    ("problem", "family", "dk", "dv"),
    [
        (DENSE, MAIN, "p.scale", "1.f"),
        (DROPOUT, MAIN, "p.scale * p.keep_scale", "p.keep_scale"),
        (SCALED_BIAS, MAIN, "p.scale", "1.f"),
        (SCALED_BIAS, WITH_BIAS, "1.f", "1.f"),
        (BIAS, WITH_BIAS, "p.scale", "1.f"),
        (SCALED_BIAS, WITH_SUMS, "p.scale", "1.f"),
    ],
)
def test_fused_factors(problem: Problem, family: str, dk: str, dv: str) -> None:
    view = view_in(problem, family)
    assert (view.dk_factor, view.dv_factor) == (dk, dv)


def test_sums_of_a_bias_are_scaled_where_it_is_before_the_scale() -> None:
    assert view_in(SCALED_BIAS, WITH_SUMS).bias_factor == "p.scale"
    assert view_in(BIAS, WITH_SUMS).bias_factor == "1.f"


def test_products_have_chains_of_the_head_dims_steps() -> None:
    fused = view_in(replace(DENSE, head_dim_qk=104, head_dim_v=72), MAIN)
    assert fused.held_steps == 3
    assert (fused.score_product.columns, fused.score_product.steps) == (64, (4, 5))
    assert (fused.dq_product.columns, fused.dq_product.steps) == (64, (8,))
    assert (fused.dk_product.columns, fused.dv_product.columns) == (112, 80)
    dq = view_in(UNLIKE, OF_QUERIES)
    assert dq.score_product.steps == (12, 8)
    assert (dq.dq_product.columns, dq.dq_product.steps) == (192, (dq.tile_n // 16,))


DKV_FLAGS = ("one_consumer", "marks_slopes", "follows_heads", "heads_matter")


@pytest.mark.parametrize(
    ("problem", "facts", "slopes"),
    [
        (LARGE, {"one_consumer", "follows_heads", "heads_matter"}, "const Packed&"),
        (UNLIKE, {"follows_heads", "heads_matter"}, "const Packed&"),
        (replace(UNLIKE, q_seq="packed", kv_seq="packed"), set(), "const Packed&"),
        (
            replace(UNLIKE, scores=("alibi",), q_seq="packed", kv_seq="packed"),
            {"heads_matter"},
            "const Packed&",
        ),
        (replace(UNLIKE, attn_mask=True), {"follows_heads", "heads_matter"}, "const Packed&"),
        (replace(UNLIKE, dropout=True), {"follows_heads", "heads_matter"}, "Packed&"),
        (
            replace(UNLIKE, dropout=True, scores=("softcap",)),
            {"marks_slopes", "follows_heads", "heads_matter"},
            "Packed&",
        ),
    ],
)
def test_dkv(problem: Problem, facts: set[str], slopes: str) -> None:
    view = view_in(problem, OF_KEYS)
    assert names_in(view, *DKV_FLAGS) == facts
    assert view.slopes_type == slopes


def test_dkv_and_dq_arrivals_count_copying_warps() -> None:
    large = replace(LARGE, kv_fetch="gather")
    for problem, kept, block, loader in ((LARGE, 1, 1, 1), (large, 32, 33, 32)):
        arrivals = view_in(problem, OF_KEYS).arrivals
        assert (arrivals.kept, arrivals.block, arrivals.loader) == (kept, block, loader)
    for problem, queries, block, loaders in ((LARGE, 1, 1, 2), (large, 64, 32, 96)):
        dq = view_in(problem, OF_QUERIES).arrivals
        assert (dq.queries, dq.block, dq.loaders) == (queries, block, loaders)


@pytest.mark.parametrize(
    ("problem", "sloped", "factor"),
    [
        (BIAS, False, "1.f"),
        (SCALED_BIAS, False, "p.scale"),
        (CAPPED_BIAS, True, "p.scale"),
        # Its gradient is dS, whatever bent scores before.
        (replace(LARGE, scores=("softcap", "post_scale_bias")), False, "1.f"),
        (replace(SCALED_BIAS, dropout=True), False, "p.scale * p.keep_scale"),
    ],
)
def test_bias_gradient(problem: Problem, sloped: bool, factor: str) -> None:
    view = view_in(problem, OF_BIAS)
    assert (view.sloped, view.factor) == (sloped, factor)


def test_bias_gradient_stage_is_full_when_both_copies_have_been_announced() -> None:
    assert view_in(BIAS, OF_BIAS).stage_arrivals == 1
    gathered = replace(BIAS, head_dim_qk=64, head_dim_v=64, kv_fetch="gather")
    assert view_in(gathered, OF_BIAS).stage_arrivals == 65


def test_mask_bits_lie_along_the_rows_of_a_kernels_products() -> None:
    assert view_in(MASKED, MAIN).pair_mask == PairMaskView("mask_columns", None)
    large = replace(LARGE, attn_mask=True)
    tensors = [view_in(large, family).pair_mask.tensor for family in (OF_KEYS, OF_QUERIES)]
    assert tensors == ["mask_columns", "mask_rows"]
    assert view_in(replace(BIAS, attn_mask=True), OF_BIAS).pair_mask.tensor == "mask_rows"
    assert view_in(DENSE, MAIN).pair_mask is None


@pytest.mark.parametrize(
    ("plain", "family"), [(DENSE, MAIN), (LARGE, OF_KEYS), (LARGE, OF_QUERIES)]
)
def test_main_headers_are_those_that_a_problem_needs(plain: Problem, family: str) -> None:
    usual = set(headers_of(view_in(plain, family)))
    packed = set(headers_of(view_in(replace(plain, q_seq="packed", kv_seq="packed"), family)))
    lengths = {"gap_rows.cuh", "packed_tiles.cuh", "sequence_order.cuh"}
    assert packed - usual == {f"scheduler/{name}" for name in lengths}
    assert ("softmax/transposed.cuh" in usual) == (family != OF_QUERIES)
    assert "context.cuh" in usual and "dropout.cuh" not in usual


def test_main_headers_of_optional_parts() -> None:
    usual = set(headers_of(view_in(DENSE, MAIN)))
    assert set(headers_of(view_in(DROPOUT, MAIN))) - usual == {"dropout.cuh"}
    assert set(headers_of(view_in(MASKED, MAIN))) - usual == {"mask_bits.cuh"}
    gathered = set(headers_of(view_in(GATHER, MAIN))) - usual
    assert gathered == {"copy/gathered_rows.cuh", "mma/store.cuh"}
    assert headers_of(view_in(ORDERED_WINDOW, MAIN))[-1] == "softmax/row.cuh"


@pytest.mark.parametrize(
    ("problem", "facts"),
    [
        (DENSE, {"zeroed_turns"}),
        (LARGE, set()),
        (PACKED, {"varlen", "zeroed_turns", "structs", "ctas_an_sm"}),
        (replace(PACKED, head_dim_qk=256, head_dim_v=256), {"varlen", "structs"}),
        (BIAS, {"marks_large", "zeroed_turns"}),
        (DROPOUT, {"dropout", "zeroed_turns"}),
        (ORDERED_WINDOW, {"zeros", "zeroed_turns", "structs", "masks", "keys", "made_tile"}),
    ],
)
def test_prepare(problem: Problem, facts: set[str]) -> None:
    view = view_in(problem, PREPARE)
    flags = ("varlen", "zeroed_turns", "structs", "ctas_an_sm", "zeros", "marks_large", "dropout")
    assert names_in(view, *flags, "masks", "keys", "made_tile") == facts
    names = ("q_len", "(first_token + row)") if problem.varlen else ("p.q_len", "row")
    assert (view.q_len, view.tensor_row) == names


@pytest.mark.parametrize(
    ("problem", "header"),
    [
        (DENSE, None),
        (ORDERED_WINDOW, "scheduler/q_blocks.cuh"),  # finds the blocks that a tile visits first
        (replace(ORDERED_WINDOW, kv_seq="used"), "scheduler/kv_blocks.cuh"),
    ],
)
def test_prepare_includes_the_walk_that_it_takes(problem: Problem, header: str | None) -> None:
    walks = {"scheduler/q_blocks.cuh", "scheduler/kv_blocks.cuh"}
    assert walks & {*headers_of(view_in(problem, PREPARE))} == ({header} if header else set())


@pytest.mark.parametrize(
    ("problem", "facts", "parts"),
    [
        (DENSE, {"sums_keys"}, 2),
        (SMALL, {"sums_keys", "splits_rows"}, 2),
        (GATHER, {"gather"}, 2),
        (PACKED, {"sums_keys", "varlen", "structs"}, 2),
        (BIAS, set(), 2),
    ],
)
def test_convert(problem: Problem, facts: set[str], parts: int) -> None:
    view = view_in(problem, CONVERT)
    assert names_in(view, "sums_keys", "splits_rows", "gather", "varlen", "structs") == facts
    assert (view.block_parts, view.parts) == (parts, "kParts")


def test_convert_knows_keys_of_equal_lengths_without_reading_them() -> None:
    dense = view_in(DENSE, CONVERT)
    assert dense.keys.dense and dense.structs == ""


def test_gathered_operands_are_all_that_a_main_kernel_reads() -> None:
    assert view_in(SMALL, MAIN).gathered == ()
    tensors = view_in(GATHER, MAIN).gathered
    assert [(each.name, each.columns_parameter) for each in tensors] == [
        ("q", "dim_qk"),
        ("k", "dim_qk"),
        ("v", "dim_v"),
        ("d_o", "dim_v"),
    ]


def test_row_sums_walk_over_blocks_of_keys_and_main_kernels_fetch_these() -> None:
    row_sums = view_in(replace(BIAS, masks=("window",)), ROW_SUMS)
    assert row_sums.kv_alias.name == "KvIteration" and row_sums.parts is None
    assert view_in(BIAS, MAIN).kv_alias.name == "KvFetch"
    assert "kv_fetch" in ROLES and "kv_iter" not in ROLES
