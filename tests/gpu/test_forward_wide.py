"""Head dims above 256: a forward whose output two warpgroups share, against float64."""

from __future__ import annotations

import pytest

from . import cases, oracle

pytestmark = pytest.mark.gpu


def case_of(d, d_v, **fields):
    return cases.Case(d, d_v, **{"heads": (1, 2, 1), "lengths": (130, 200), **fields})


CASES = [
    case_of(512, 512),
    case_of(512, 512, mask="causal", lengths=(200, 200)),
    case_of(320, 320, mask="causal_bottom_right", dtype="fp16", layout="bhsd"),
    case_of(576, 512, mask="causal", window=(70, 0), layout="sbhd"),
    case_of(264, 72, window=(5, 90), lengths=(65, 127)),
    case_of(128, 448, lengths=(1, 300)),
    case_of(384, 384, partial=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_wide_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)
