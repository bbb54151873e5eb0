"""Short calls: the plan with tiles of 64 queries, and which calls it serves."""

from __future__ import annotations

import itertools

import pytest

from attngen import AttentionSpec
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.io.values import to_data
from attngen.kernels.plan import plans, read_plan
from attngen.kernels.selection import of_call
from attngen.kernels.wgmma.forward.cost import prefers_short
from attngen.runtime.run_time import UNBOUNDED, Extent, smem_bytes_of
from attngen.spec import resolve
from attngen.spec.attention_spec import has_short, is_decode
from attngen.targets.target import DEFAULT
from tests.support.cache_kit import ARCH

KNOWN = features.scan()


def problem_of(head_dim=64, **fields):
    (problem,) = resolve.resolve(AttentionSpec(head_dim, **fields), KNOWN)
    return problem


def family_name(plan):
    return plan.family


def test_plan_short_fits_an_sm_twice_or_three_times():
    for d, mask, window, softcap, softmax in itertools.product(
        range(8, 129, 8), ("none", "causal"), (False, True), (False, True), ("vanilla", "learnable")
    ):
        asked = {"mask": mask, "window": window, "softcap": softcap, "softmax": softmax}
        assert has_short(AttentionSpec(d, **asked))
        _, plan = plans(problem_of(d, **asked), ARCH)
        assert (plan.family, plan.tile.m, plan.threads) == ("sm90_fwd_short", 64, 256)
        masked = mask != "none" or window
        assert (plan.ctas, plan.tile.n) == ((2, 64) if d > 64 else (3, 64) if masked else (2, 128))
        producer, consumer = plan.pipeline.producer_registers, plan.pipeline.consumer_registers
        assert plan.ctas * 128 * (producer + consumer) <= 65536
        assert plan.smem_bytes <= DEFAULT.smem_share(plan.ctas)
        assert f"{plan.ctas} CTAs an SM" in " ".join(plan.why) and read_plan(to_data(plan)) == plan


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 136},
        {"head_dim": 64, "head_dim_v": 192},
        {"dtype": "e4m3"},
        {"kv_dtype": "e4m3"},
        {"out_dtype": "fp32"},
        {"layout": "thd"},
        {"seqused": True},
        {"gather": True},
        {"dropout": True},
        {"attn_mask": True},
        {"bias": "post_scale"},
        {"decode": True},
        {"layout": "paged_kv_bshd_bshd_bshd"},
    ],
    ids=str,
)
def test_plan_short_is_none_where_it_has_no_room_or_part(fields):
    assert not has_short(AttentionSpec(**{"head_dim": 64, **fields}))
    found = plans(problem_of(**fields), ARCH)
    assert all(each.family != "sm90_fwd_short" for each in found)
    for name in ("sm90_fwd", "sm90_fwd_short"):
        assert of_call(found, family_name, name) == [*found]


def test_plans_of_a_call_are_one_of_both():
    large, small = found = plans(problem_of(), ARCH)
    assert of_call(found, family_name, "sm90_fwd") == [large]
    assert of_call(found, family_name, "sm90_fwd_short") == [small]
    assert of_call(found, family_name, None) == [large, small]
    assert of_call((large,), family_name, "sm90_fwd_short") == [large]  # an earlier version's


@pytest.mark.parametrize(
    ("batch", "seq", "heads", "dim", "faster"),  # each measured, H200 or H100
    [
        (32, 128, 32, 64, (True, True)),
        (32, 256, 32, 64, (False, True)),
        (32, 384, 32, 64, (True, True)),
        (32, 512, 32, 64, (False, True)),
        (1, 512, 32, 64, (True, True)),
        (3, 192, 32, 64, (False, True)),
        (32, 64, 16, 128, (True, True)),
        (128, 128, 16, 128, (False, False)),
        (32, 512, 16, 128, (False, False)),
        (4, 128, 16, 128, (True, True)),
        (1, 512, 16, 128, (True, True)),
    ],
)
def test_prefers_short_follows_what_was_measured(batch, seq, heads, dim, faster):
    extents = dict.fromkeys("qkv", Extent(batch, seq, heads, dim, 0, 0, 0))
    sides = (UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0)
    found = tuple(prefers_short(extents, each, False, 132, plain=True) for each in sides)
    assert found == faster


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_prefers_short_under_windows_where_tiles_are_few(dim):  # each measured, H200
    extents = dict.fromkeys("qkv", Extent(4, 4096, 16, dim, 0, 0, 0))
    for left in (127, 511, 1023, 2047):
        assert not prefers_short(extents, (left, 0), False, 132, window=True)
    extents = dict.fromkeys("qkv", Extent(1, 1024, 16, dim, 0, 0, 0))
    assert prefers_short(extents, (511, 0), False, 132, window=True)


def test_prefers_short_counts_the_keys_that_are_seen():
    """Rows aligned at the bottom right see more keys, and some rows see none."""
    q, k = (Extent(8, seq, 32, 64, 0, 0, 0) for seq in (512, 8192))
    extents = {"q": q, "k": k, "v": k}
    assert not prefers_short(extents, (UNBOUNDED, 0), True, 132)  # 15 of 16 keys in any case
    assert prefers_short(extents, (UNBOUNDED, 0), False, 132)
    assert prefers_short(extents, (127, 0), True, 132)
    assert prefers_short({"q": k, "k": q, "v": q}, (127, 0), False, 132)


def test_prefers_short_beside_scores_at_64_counts_tiles_of_192_rows():
    extents = dict.fromkeys("qkv", Extent(32, 384, 32, 64, 0, 0, 0))
    sides = (UNBOUNDED, UNBOUNDED)
    assert prefers_short(extents, sides, False, 132, plain=True)
    assert not prefers_short(extents, sides, False, 132)


@pytest.mark.parametrize(
    ("fields", "q", "k", "splits", "decode"),
    [
        ({}, (4, 64, 8, 64), (4, 64, 8, 64), None, False),
        ({}, (4, 64, 8, 64), (4, 64, 8, 64), 1, True),  # the same bits in any batch
        ({}, (4, 64, 8, 64), (4, 65, 8, 64), None, True),
        ({}, (4, 16, 8, 64), (4, 64, 2, 64), None, True),  # heads of a group share a tile
        ({"seqused": True}, (4, 64, 8, 64), (4, 64, 8, 64), None, True),
        ({"head_dim": 256}, (4, 64, 8, 256), (4, 64, 8, 256), None, True),
    ],
)
def test_few_queries_of_few_keys_are_not_split(fields, q, k, splits, decode):
    assert is_decode(AttentionSpec(**{"head_dim": 64, **fields}), q, k, splits) == decode


def test_ctas_that_an_sm_has_fewer_of_leave_no_room_for_more():
    _, plan = plans(problem_of(mask="causal"), ARCH)
    kernel = render_problem(problem_of(mask="causal"), plan).kernel
    assert kernel.dependent and kernel.ctas == 3
    found = [smem_bytes_of(kernel, share, DEFAULT) for share in range(1, 5)]
    assert found == [232448, 115712, kernel.smem_bytes, kernel.smem_bytes]
