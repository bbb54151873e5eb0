"""A torch that lacks some of its private parts, to whoever looks for them here."""

from __future__ import annotations

import operator
from collections.abc import Collection

import pytest

LEVEL = "autograd.forward_ad._current_level"


def hide(patch: pytest.MonkeyPatch, names: Collection[str]) -> None:
    """Torch itself goes on using them."""
    find = operator.attrgetter

    def attrgetter(name: str) -> operator.attrgetter:
        if name in names:
            raise AttributeError(name)
        return find(name)

    patch.setattr(operator, "attrgetter", attrgetter)
    if LEVEL in names:
        patch.delattr(f"torch.{LEVEL}")
