"""The covering set: every legal pair is in it, and every kernel of it compiles."""

from __future__ import annotations

import itertools
import re

import pytest
from click.testing import CliRunner

from attngen.cli.main import main
from attngen.fragments import features
from attngen.spec import coverage
from attngen.spec.coverage import AXES, Member
from attngen.spec.resolve import resolve
from tools import sweep

KNOWN = features.scan()
MEMBERS = coverage.members(KNOWN)


def test_members_hold_every_legal_pair_and_no_illegal_one() -> None:
    met = set().union(*map(coverage.pairs_of, MEMBERS))
    assert met == coverage.legal_pairs(KNOWN)
    assert all(coverage.is_legal(member, KNOWN) for member in MEMBERS)
    assert len(set(MEMBERS)) == len(MEMBERS) <= 41


def test_legal_pairs_are_all_but_those_that_the_semantics_exclude() -> None:
    everything = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[one], AXES[other])
    }
    assert (
        everything - coverage.legal_pairs(KNOWN)
        == {
            (("head_dims", (72, 40)), ("dtype", "e4m3")),  # multiples of 16
            (("head_dims", (72, 40)), ("dtype", "bf16/e4m3")),
            *(
                (("head_dims", (512, 448)), ("dtype", dtype))  # 16 bits alone
                for dtype in ("e4m3", "bf16/e4m3")
            ),
            (("dtype", "e4m3"), ("splits", True)),
            (("fetch", "gather"), ("splits", True)),  # which the copy engine alone reads
            (("attn_mask", True), ("splits", True)),
            (("dropout", True), ("splits", True)),
            (("positions", True), ("splits", True)),
            (("mask", "causal_bottom_right"), ("positions", True)),  # which says where it lies
            *((("bias", kind), ("splits", True)) for kind in AXES["bias"][1:]),
            *((("bias_shape", shape), ("splits", True)) for shape in AXES["bias_shape"][1:]),
            *(
                (("dtype", dtype), other)
                for dtype in ("e4m3", "bf16/e4m3")
                for other in (
                    *(("training", True), ("deterministic", True)),  # no backward in 8 bits
                    ("positions", True),
                    ("fetch", "gather"),
                    ("bias", "pre_scale"),
                )
            ),
            (("dtype", "bf16/e4m3"), ("bias", "post_scale")),
            *((("dtype", "bf16/e4m3"), ("bias_shape", shape)) for shape in AXES["bias_shape"][1:]),
            (("dtype", "bf16/e4m3"), ("attn_mask", True)),
            (("dtype", "bf16/e4m3"), ("dropout", True)),
            *((("bias", "none"), ("bias_shape", shape)) for shape in AXES["bias_shape"][1:]),
            (("layout", "thd"), ("seqused", True)),  # packed tokens have lengths of their own
            (("training", False), ("deterministic", True)),  # nothing to add up
        }
    )


def test_member_reaches_its_problems() -> None:
    member = Member(
        (128, 64), "fp16", "causal_bottom_right", "learnable", "sbhd", "gather",
        seqused=True, window=True, alibi=True, softcap=True, max_logit=True, bias="pre_scale",
        bias_shape="b1ss", attn_mask=True, dropout=True, positions=False, group_size=4,
        splits=False, training=True, deterministic=True,
    )  # fmt: skip
    forward, backward = member.problems(KNOWN)
    assert (forward,) == resolve(member.spec, KNOWN)
    assert forward.masks == ("causal", "window")
    assert forward.scores == ("pre_scale_bias", "softcap", "alibi")
    assert (forward.softmax, forward.max_logit, forward.direction) == ("learnable", True, "fwd")
    assert (backward.direction, backward.deterministic) == ("bwd", True)
    assert (backward.softmax, backward.max_logit) == ("vanilla", False)
    assert backward.scores == forward.scores and backward.masks == forward.masks
    for problem in (forward, backward):
        assert problem.q_seq == "used" and problem.dropout and problem.attn_mask


# Kernels of few sums beside a backward, each named, whose spills are taken.
SPILLS = (
    r"bwd_row_sums__causal_pre_scale_bias_packed_dropout_d128_bf16_gather_deterministic__\w+: "
    "8 bytes of spills"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_member_compiles_and_the_list_says_so() -> None:
    problems = {p for member in MEMBERS for p in member.problems(KNOWN)}
    failures = [line for line in sweep.failures(problems) if not re.match(SPILLS, line)]
    assert failures == []
    lines = CliRunner().invoke(main, ["list", "--coverage"]).output.splitlines()
    assert lines[:-1] == [str(member) for member in MEMBERS]
    assert re.fullmatch(r"coverage: (\d+) of \1 legal pairs, 100\.0 %", lines[-1])
