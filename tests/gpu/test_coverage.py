"""Every member of the covering set of `attngen list --coverage`, by the float64 rules."""

from __future__ import annotations

import pytest

from attngen import coverage, features

from . import gradients, variants
from .cases import Case
from .cases_fp8 import Fp8Case
from .variants import Variant

pytestmark = pytest.mark.gpu
LENGTHS = ((257, 200), (130, 333), (200, 200))


def call_of(number: int, member: coverage.Member) -> Variant:
    """A call of the member, of lengths, windows and slopes that turn."""
    window = ((50, 20), (0, 130), (30, -1))[number % 3] if member.window else (-1, -1)
    eight_bit = member.dtype == "e4m3"
    case = (Fp8Case if eight_bit else Case)(
        *member.head_dims, member.dtype, member.mask, window, None,
        heads=(2, 4, 4 // member.group_size), lengths=LENGTHS[number % 3], layout=member.layout,
    )  # fmt: skip
    return Variant(
        case,
        alibi=("default", "h", "bh")[number % 3] if member.alibi else "",
        softmax=member.softmax,
        softcap=(30.0, 1.5)[number % 2] if member.softcap else 0.0,
        max_logit=member.max_logit,
        deterministic=member.deterministic,
    )


MEMBERS = [(m, call_of(n, m)) for n, m in enumerate(coverage.members(features.scan()))]
KERNELS = [call.spec for _, call in MEMBERS]


@pytest.fixture(scope="module", autouse=True)
def backward_kernels() -> None:
    gradients.compile_all([call.backward for member, call in MEMBERS if member.training])


@pytest.mark.parametrize(("member", "call"), MEMBERS, ids=lambda value: str(value))
def test_coverage_member_is_right(member, call):
    variants.check_forward(call)
    if member.training:
        variants.check_backward(call)
