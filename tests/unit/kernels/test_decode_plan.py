"""Plans, sources and binaries of the kernels that split keys."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from attngen import AttentionSpec
from attngen.compiler import batch
from attngen.compiler.builder import render_problem
from attngen.compiler.cache import Cache
from attngen.compiler.explain import aim
from attngen.fragments import features
from attngen.io.values import to_data
from attngen.kernels.plan import plans, read_plan
from attngen.runtime.run_time import MAX_SPLITS
from attngen.spec import resolve
from attngen.targets.target import DEFAULT

ARCH = "sm_90a"
PAGED = "paged_kv_bshd_bshd_bshd"
KNOWN = features.scan()


def problem_of(head_dim=128, **fields):
    (problem,) = resolve.resolve(AttentionSpec(head_dim, **fields), KNOWN)
    return problem


def test_plans_of_every_pair_of_head_dims_fit():
    plain = problem_of(decode=True)
    for d, d_v in itertools.product(range(8, 257, 8), repeat=2):
        problem = dataclasses.replace(plain, head_dim_qk=d, head_dim_v=d_v)
        decode, combine = plans(problem, ARCH)
        assert decode.smem_bytes <= DEFAULT.smem_share(decode.ctas)
        assert decode.smem[0].offset == 0 and all(r.offset % 1024 == 0 for r in decode.smem[:3])
        assert decode.tile.n % 8 == 0 and combine.max_splits == MAX_SPLITS
        assert [read_plan(to_data(each)) for each in (decode, combine)] == [decode, combine]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": 64, "seqused": True, "window": True},
        {"head_dim": 256, "layout": PAGED, "mask": "causal"},
        {"head_dim": 8, "head_dim_v": 256, "dtype": "fp16", "layout": PAGED},
        {"head_dim": 192, "head_dim_v": 128, "layout": "paged_kv_thd_sbhd_sbhd", "mask": "causal"},
        {
            "layout": PAGED,
            "window": True,
            "alibi": True,
            "softcap": True,
            "softmax": "learnable",
            "return_max_logit": True,
        },
        {"head_dim": 576, "head_dim_v": 512, "layout": PAGED, "softcap": True},
        {"head_dim": 64, "head_dim_v": 384, "layout": "paged_kv_thd_bshd_bshd"},
        {"head_dim": 264, "head_dim_v": 456, "layout": PAGED},
        {"head_dim": 560, "head_dim_v": 320, "mask": "causal"},
        {"head_dim": 304, "head_dim_v": 272, "kv_dtype": "e4m3", "layout": PAGED},
        {
            "head_dim": 256,
            "mask": "causal",
            "alibi": True,
            "softcap": True,
            "softmax": "off_by_one",
        },
    ],
    ids=str,
)
def test_build_decode_keeps_everything_in_registers(fields, tmp_path):
    """A spec names all kernels; one bundle keeps them together."""
    spec = AttentionSpec(**{"head_dim": 128, "decode": True, **fields})
    jobs, refused = batch.jobs_of([spec], None)
    families = [job.plan.family for job in jobs]
    assert not refused and families == ["sm90_decode", "combine"]
    outcomes = [*batch.run(jobs, Cache(tmp_path), 1)]
    for outcome in outcomes:
        assert outcome.error is None and outcome.binary is not None
        found = outcome.binary.resources
        assert (found.spill_bytes, found.stack_bytes) == (0, 0)
        ctas = getattr(outcome.job.plan, "ctas", 2)
        assert found.registers <= 65536 // (outcome.job.plan.threads * ctas)
    (program,) = batch.programs_of(outcomes)
    entries = [each.binary.kernel.entry.split("__")[0] for each in program.kernels]
    assert entries == families and program.problem.decode


def test_plans_say_how_many_ctas_keep_the_memory_busy():
    for fields, wanted in (
        ({"head_dim": 64}, (2, 128, 0.92)),
        ({"head_dim": 128}, (2, 64, 0.76)),
        ({"head_dim": 256}, (1, 64, 0.76)),
        ({"head_dim": 576, "head_dim_v": 512}, (1, 32, 1.0)),
        ({"head_dim": 128, "kv_dtype": "e4m3"}, (2, 64, 2.0)),
    ):
        reader, _ = plans(problem_of(**fields, decode=True), ARCH)
        assert (reader.ctas, reader.tile.n, reader.busy_ctas) == wanted


def test_plans_of_wide_head_dims_fit():
    plain = problem_of(decode=True)
    for d in (8, 256, 264, 320, 512, 576):
        for d_v in (8, 256, 264, 320, 384, 456, 512):
            problem = dataclasses.replace(plain, head_dim_qk=d, head_dim_v=d_v)
            decode, *_ = plans(problem, ARCH)
            assert decode.smem_bytes <= DEFAULT.cta_smem_bytes and decode.consumers == (
                1 + (d_v > 256)
            )
            assert decode.threads == (160 if d_v <= 256 else 384)
            assert decode.stages > 1
            # Of the last stage two warpgroups read as many boxes each, whether they exist or not.
            columns = decode.consumers * decode.columns
            behind = max(0, columns - 64 * -(-d_v // 64))
            values = next(region for region in decode.smem if region.name == "V")
            whole = decode.stages * decode.tile.n * 128 * -(-d_v // 64)
            assert columns >= d_v and values.bytes == whole + decode.tile.n * 2 * behind


@pytest.mark.parametrize(
    ("fields", "wrong", "legal", "arithmetic"),
    [
        ({"head_dim": 577}, "head_dim", 576, "208 of 227 KiB"),
        ({"head_dim": 1024, "head_dim_v": 512}, "head_dim", 576, "208 of 227 KiB"),
        ({"head_dim": 576, "head_dim_v": 576}, "head_dim_v", 512, "128 registers"),
        ({"head_dim": 576, "head_dim_v": 260}, "head_dim_v", 264, "multiples of 8 up to 512"),
        ({"head_dim": 561, "head_dim_v": 512}, "head_dim", 568, "multiples of 8 up to 576"),
    ],
    ids=str,
)
def test_resolve_head_dims_beyond_an_sm_are_refused_with_the_arithmetic(
    fields, wrong, legal, arithmetic
):
    (found,) = resolve.find_violations(AttentionSpec(**fields, decode=True), KNOWN)
    assert (found.field, found.nearest) == (wrong, legal) and arithmetic in found.reason
    joined = AttentionSpec(**fields, directions=("fwd", "bwd"))
    assert {v.nearest for v in resolve.find_violations(joined, KNOWN)} == {512}


def test_arithmetic_of_the_widest_head_dims_is_that_of_the_plan():
    plan, *_ = plans(problem_of(head_dim=576, head_dim_v=512, decode=True), ARCH)
    assert (plan.tile.n, plan.stages, plan.smem_bytes >> 10) == (32, 2, 208)
    assert plan.tile.m * 512 == 128 * 128 * plan.consumers  # rows, columns; registers, threads


def test_render_plain_decode_has_no_code_for_what_it_lacks():
    plain = problem_of(decode=True)
    text = render_problem(plain, plans(plain, ARCH)[0]).text
    for word in ("PageFetch", "clear_rows", "PackedTiles", "PagedBlocks", "ScoreList", "max_logit"):
        assert word not in text
    packed = problem_of(decode=True, layout="paged_kv_thd_bshd_bshd")
    text = render_problem(packed, plans(packed, ARCH)[0]).text
    for word in ("PageFetch", "clear_rows", "PackedTiles", "PagedBlocks"):
        assert word in text


def test_render_decode_entry_says_where_lengths_vary_once():
    problem = problem_of(decode=True, layout=PAGED, mask="causal")
    assert problem.label == "causal_used_d128_bf16_paged"
    label = problem_of(decode=True, layout="paged_kv_thd_bshd_bshd").label
    assert label == "full_packed_used_d128_bf16_paged"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"dtype": "e4m3", "layout": PAGED}, "dtype"),
        ({"out_dtype": "fp32", "decode": True}, "out_dtype"),
        ({"dropout": True, "decode": True}, "dropout"),
        ({"attn_mask": True, "softcap": True, "layout": PAGED}, "attn_mask"),
        ({"directions": ("fwd", "bwd"), "layout": PAGED}, "directions"),
        ({"directions": ("bwd",), "decode": True}, "directions"),
    ],
    ids=str,
)
def test_resolve_what_splits_no_keys_is_refused_with_a_legal_spec(fields, wrong):
    spec = AttentionSpec(**{"head_dim": 128, "decode": True, **fields})
    assert [v.field for v in resolve.find_violations(spec, KNOWN)] == [wrong]
    legal = resolve.nearest(spec, KNOWN)
    assert not resolve.find_violations(legal, KNOWN) and all(
        problem.decode for problem in resolve.resolve(legal, KNOWN)
    )


def test_explain_decode_aims_at_the_memory():
    problem = problem_of(head_dim=256, decode=True)
    decode, *_, combine = plans(problem, ARCH)
    (line,) = aim(problem, decode)
    # a row does 2 FLOPs with each key's column, which has 2 bytes
    assert line.startswith("aims at the memory: 64 FLOPs") and line.endswith("1 CTA an SM")
    assert [*aim(problem_of(decode=True), plans(problem_of(decode=True), ARCH)[0])][0].endswith(
        "2 CTAs an SM"
    )
    (line,) = aim(problem, combine)
    assert "no products" in line
