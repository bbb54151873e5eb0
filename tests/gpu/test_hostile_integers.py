"""Whatever the integers in device tensors say, kernels touch their operands alone, and sequences
whose own entries are sane have the results that they have without the others."""

from __future__ import annotations

import random

import pytest

from .cases_hostile import CALLS, KV, KV_AT, PAGES, Q_AT, TOKENS, Q, packed
from .hostile import HIGHEST, LOWEST, Hostile

pytestmark = pytest.mark.gpu

KERNELS = list(dict.fromkeys(each.spec for each in (*CALLS, *PAGES)))


@pytest.mark.parametrize("case", [*CALLS, *PAGES], ids=str)
def test_garbage_touches_nothing_but_operands(case):
    case.check()


def drawn(seed: int) -> tuple[tuple[str, int, int], ...]:
    """Some entries, each near the tensor, a limit, or anything."""
    draw = random.Random(seed)
    limits = (LOWEST, HIGHEST, 1 << 30, -(1 << 30), TOKENS)
    return tuple(
        (
            draw.choice((Q, KV, Q_AT, KV_AT)),
            draw.randrange(6),
            draw.choice(
                (draw.randint(-3, TOKENS + 70), draw.choice(limits), draw.randint(LOWEST, HIGHEST))
            ),
        )
        for _ in range(draw.randint(1, 8))
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_garbage_touches_nothing_but_operands(seed):
    case = Hostile(packed(d=64, gaps=True), drawn(seed), deterministic=seed % 2 == 1)
    case.check(surely_wrong=False)
