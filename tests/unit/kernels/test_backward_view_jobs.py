"""The views of a backward's kernels: how tiles are drawn, and what they visit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.kernels.wgmma.backward.plan import MAIN, OF_KEYS, OF_QUERIES, WITH_BIAS
from attngen.kernels.wgmma.backward.view_jobs import JobsView
from attngen.spec.problem import Problem
from tests.support.backward_kit import (
    BIAS,
    CAUSAL,
    DENSE,
    GATHER,
    LARGE,
    LARGE_BIAS,
    ORDERED,
    ORDERED_WINDOW,
    PACKED,
    SMALL,
    USED,
    names_in,
    view_in,
)


@pytest.mark.parametrize(
    ("problem", "family", "facts"),
    [
        (DENSE, MAIN, set()),
        (CAUSAL, MAIN, {"waves", "waves_of_grid", "short_head"}),
        (replace(CAUSAL, deterministic=True), MAIN, {"waves", "waves_of_grid", "ordered"}),
        (
            replace(PACKED, masks=("causal",)),
            MAIN,
            {"waves", "waves_of_sequences", "packed", "fills"},
        ),
        (USED, MAIN, {"fills"}),
        (ORDERED, MAIN, {"ordered"}),
        (BIAS, WITH_BIAS, {"ordered"}),
        (LARGE, OF_KEYS, set()),
        (replace(LARGE, kv_seq="used"), OF_KEYS, {"idle_warp"}),
        (replace(LARGE, kv_seq="used"), OF_QUERIES, {"idle_warp"}),
        (replace(LARGE, kv_seq="used", kv_fetch="gather"), OF_KEYS, {"fills"}),
    ],
)
def test_jobs_facts(problem: Problem, family: str, facts: set[str]) -> None:
    jobs = view_in(problem, family).jobs
    flags = ("waves", "waves_of_grid", "waves_of_sequences", "short_head")
    assert names_in(jobs, *flags, "ordered", "packed", "fills", "idle_warp") == facts


def test_jobs_of_queries_and_of_keys_differ_in_axis() -> None:
    def words(jobs: JobsView) -> tuple[str, ...]:
        return jobs.tiles, jobs.heads, jobs.query_head, jobs.length, jobs.find_blocks

    of_keys = ("kv_blocks", "heads_kv", "tile.head * p.group_size", "kv_len")
    assert words(view_in(LARGE, OF_KEYS).jobs) == (*of_keys, "q_block_range<kTileM>")
    of_queries = ("q_tiles", "heads_q", "tile.head", "q_len")
    assert words(view_in(LARGE, OF_QUERIES).jobs) == (*of_queries, "kv_block_range<kTileN>")


def test_jobs_order_takes_the_last_tiles_first_where_those_are_longest() -> None:
    assert view_in(DENSE, MAIN).jobs.order_arguments == "false"
    assert view_in(USED, MAIN).jobs.order_arguments == "false, 0"
    assert view_in(ORDERED_WINDOW, MAIN).jobs.order_arguments == "true"
    assert view_in(replace(LARGE, masks=("causal",)), OF_QUERIES).jobs.order_arguments == "true"
    alone = [
        view_in(each, MAIN).jobs.alone_ascends
        for each in (CAUSAL, replace(CAUSAL, deterministic=True))
    ]
    assert alone == ["true", "false"]


@pytest.mark.parametrize(
    ("problem", "members"),
    [
        (DENSE, []),
        (CAUSAL, ["ascends"]),
        (ORDERED, []),
        (ORDERED_WINDOW, ["turns"]),
    ],
)
def test_jobs_members(problem: Problem, members: list[str]) -> None:
    assert [member.name for member in view_in(problem, MAIN).jobs.members] == members


def test_jobs_axis_is_there_where_lengths_vary() -> None:
    assert view_in(DENSE, MAIN).jobs.axis is None
    axis = view_in(PACKED, MAIN).jobs.axis
    assert (axis.side, axis.rows, axis.follows, axis.orders_few) == ("key", 128, False, True)
    positions = axis.positions
    # Without sums of dQ in L2, 128 columns of 4 bytes, more positions fit.
    large = replace(PACKED, head_dim_qk=256, head_dim_v=256)
    assert view_in(large, OF_QUERIES).jobs.axis.positions == (64 << 20) // (512 * 2)
    assert positions == (64 << 20) // (256 * 2 + 128 * 4)


def test_jobs_loader_does_nothing_where_warps_copy_rows() -> None:
    assert view_in(SMALL, MAIN).jobs.loader == "KvLoader{p, smem}"
    assert view_in(LARGE, OF_QUERIES).jobs.loader == "QueryLoader{p, smem}"
    assert view_in(GATHER, MAIN).jobs.loader == "[](const Job&) {}"


@pytest.mark.parametrize(
    ("problem", "family", "gaps"),
    [
        (DENSE, MAIN, []),
        (USED, MAIN, [("kv_sequence(p)", False, ["dk", "dv"])]),
        (PACKED, MAIN, [("q_sequence(p)", True, ["dq"]), ("kv_sequence(p)", False, ["dk", "dv"])]),
        (replace(PACKED, head_dim_qk=256), OF_KEYS, [("kv_sequence(p)", False, ["dk", "dv"])]),
        (replace(PACKED, head_dim_qk=256), OF_QUERIES, [("q_sequence(p)", False, ["dq"])]),
    ],
)
def test_gaps_are_filled_by_who_makes_the_gradient(
    problem: Problem, family: str, gaps: list[tuple[str, bool, list[str]]]
) -> None:
    found = view_in(problem, family).gaps
    assert [
        (gap.sequence, gap.optional, [each.name for each in gap.tensors]) for gap in found
    ] == gaps


def test_gaps_of_keys_count_key_heads_where_query_heads_have_tiles_of_their_own() -> None:
    assert view_in(PACKED, MAIN).gaps[1].heads == "p.heads_kv / p.key_group"
    large = replace(PACKED, head_dim_qk=256)
    assert view_in(large, OF_KEYS).gaps[0].heads == "p.heads_kv"


@pytest.mark.parametrize(
    ("problem", "family", "facts", "first"),
    [
        (DENSE, MAIN, set(), "job.block_begin"),
        (CAUSAL, MAIN, {"one_loop", "heads_inside", "begins_anywhere"}, "first_block(job)"),
        (ORDERED, MAIN, {"one_loop", "heads_inside"}, "job.block_end - 1"),
        (ORDERED_WINDOW, MAIN, {"one_loop", "blocks_inside"}, "job.block_begin"),
        (LARGE, OF_KEYS, set(), "job.block_begin"),
        # A consumer that fetches what scores read has to know which block comes next.
        (LARGE_BIAS, OF_KEYS, {"blocks_inside"}, "job.block_begin"),
        (BIAS, MAIN, set(), "job.block_begin"),
    ],
)
def test_visits(problem: Problem, family: str, facts: set[str], first: str) -> None:
    visits = view_in(problem, family).visits
    flags = ("one_loop", "heads_inside", "blocks_inside", "begins_anywhere")
    assert names_in(visits, *flags) == facts
    assert visits.first_block == first
