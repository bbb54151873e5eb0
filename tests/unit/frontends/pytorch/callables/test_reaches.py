"""Loads of scores that learn: which elements of a tile read the same number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attngen.fragments.lowering import reaches_of
from attngen.frontends.pytorch.callables import calls as callables

TABLE, FLAT = torch.randn(4, 80).requires_grad_(), torch.randn(80).requires_grad_()
SCORES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    "head": (lambda s, b, h, i, j: s + FLAT[h], ("kTile",)),
    "row": (lambda s, b, h, i, j: s + TABLE[h, i], ("kRow",)),
    "column": (lambda s, b, h, i, j: s + TABLE[b, j], ("kColumn",)),
    "distance": (lambda s, b, h, i, j: s + TABLE[h, j - i + 40], ("kDiagonal",)),
    "bucket": (
        lambda s, b, h, i, j: s + TABLE[h, torch.where(j > i, (i - j).abs() // 2, i - j)],
        ("kDiagonal",),
    ),
    "twice": (
        lambda s, b, h, i, j: s + TABLE[h, j - i + 40] * FLAT[(i - j).abs()],
        ("kDiagonal", "kAny"),
    ),
    "kinds": (lambda s, b, h, i, j: s + TABLE[i % 4, j % 7], ("kAny",)),
    "shifted": (lambda s, b, h, i, j: s + TABLE[h, (j + i) % 80], ("kAny",)),
}


@pytest.mark.parametrize("name", SCORES)
def test_loads_say_which_elements_read_one_number(name) -> None:
    mod, wanted = SCORES[name]
    program = callables._traced("score_mod", mod, torch.device("cpu")).program
    assert sorted(reaches_of(program)) == sorted(wanted)
