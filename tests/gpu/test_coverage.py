"""Every member of the covering set of `attngen list --coverage`, by the float64 rules."""

from __future__ import annotations

import pytest

from attngen.fragments import features
from attngen.spec import coverage
from attngen.spec.problem import Problem

from . import kv_cache, variants, varlen
from .cases import Case
from .cases_fp8 import Fp8Case
from .variants import Variant
from .varlen import Call, Features

pytestmark = pytest.mark.gpu
LENGTHS = ((257, 200), (130, 333), (200, 200))
WINDOWS = ((50, 20), (0, 130), (30, -1))
LOOSE = ("rows2", "start1", "apart", "start4")  # where operands lie that threads copy
PLACES = ((48, 16), (21, 40))
MANY = (130, 0, 1, 257, 64), (200, 7, 0, 300, 129)  # of sequences in one call


def scored(number: int, member: coverage.Member) -> dict:
    """Scores, sinks and maxima of a call, slopes and caps in turn."""
    return {
        "alibi": ("default", "h", "bh")[number % 3] if member.alibi else "",
        "softmax": member.softmax,
        "softcap": (30.0, 1.5)[number % 2] if member.softcap else 0.0,
        "max_logit": member.max_logit,
    }


def is_plain(member: coverage.Member) -> bool:
    """Whether all sequences are dense, for the copy engine to read, and nothing is hidden, dropped
    or added one by one."""
    if member.fetch == "gather":
        return False
    varying = member.layout == "thd" or member.seqused
    beside = member.attn_mask or member.dropout or member.positions or member.bias != "none"
    return not (varying or beside)


def call_of(number: int, member: coverage.Member) -> Variant | Call:
    """A call of the member, of lengths and windows that turn."""
    window = WINDOWS[number % 3] if member.window else (-1, -1)
    heads, lengths = (4, 4 // member.group_size), LENGTHS[number % 3]
    if is_plain(member):
        eight_bit, dtype = member.dtype == "e4m3", member.spec.dtype
        case = (Fp8Case if eight_bit else Case)(
            *member.head_dims, dtype, member.mask, window, None,
            heads=(2, *heads), lengths=lengths, layout=member.layout,
        )  # fmt: skip
        return Variant(
            case,
            **scored(number, member),
            deterministic=member.deterministic,
            num_splits=3 if member.splits else None,
        )
    more = Features(
        **scored(number, member),
        dropout=(0.1, 0.5)[number % 2] * member.dropout,
        seen=(0.5, 0.05)[number % 2] * member.attn_mask,
        bias=member.bias if member.bias != "none" else "",
        bias_shape=member.bias_shape,
        positions=PLACES[number % 2] if member.positions else (),
    )
    varying = member.layout == "thd" or member.seqused
    q_lens, kv_lens = MANY if varying else tuple((length,) * 2 for length in lengths)
    return Call(
        member.layout, q_lens, kv_lens, room=(300, 310) if member.seqused else None,
        gaps=member.layout == "thd", d=member.head_dims[0], d_v=member.head_dims[1],
        heads=heads, mask=member.mask, window=window, dtype=member.spec.dtype, more=more,
        loose=LOOSE[number % 4] if member.fetch == "gather" else "",
    )  # fmt: skip


MEMBERS = [(m, call_of(n, m)) for n, m in enumerate(coverage.members(features.scan()))]
KERNELS = [m.spec if m.spec.widens else call.spec for m, call in MEMBERS]


def problems() -> list[Problem]:
    """Problems of both directions, of every member."""
    known = features.scan()
    return [problem for m, _ in MEMBERS for problem in m.problems(known)]


@pytest.mark.parametrize(("member", "call"), MEMBERS, ids=lambda value: str(value))
def test_coverage_member_is_right(member, call):
    if member.spec.widens:
        kv_cache.check_narrowed(call, member.max_logit, 3 if member.splits else None)
    elif isinstance(call, Variant):
        variants.check_forward(call)
        if member.training:
            variants.check_backward(call)
    elif member.dtype == "e4m3":
        varlen.check_alone(call)
    elif not call.trains:
        varlen.check_forward(call, num_splits=3 if member.splits else None)
    else:
        splits = 3 if member.splits else None
        varlen.check(call, deterministic=member.deterministic, num_splits=splits)
