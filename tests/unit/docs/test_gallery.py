"""The code of the page of masks and scores runs as it stands, and so does each of its functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import attngen
from tests.support.paths import ROOT
from tools.callable_cases import CASES

PAGE = (ROOT / "docs" / "guide" / "gallery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    """Names that the page's code defines."""
    found: dict[str, Any] = {"__name__": __name__}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), found)
    return found


@pytest.mark.parametrize("name", CASES)
def test_function_of_the_page_serves_a_call(space, name) -> None:
    given = space[name](space["At"](2, 4, 64, "cpu"))
    q, k, v = torch.randn(3, 2, 64, 4, 16, generator=torch.Generator().manual_seed(0)).unbind()
    called = {"score_mod": given.score_mod, "mask_mod": given.mask_mod}
    assert set(called.values()) != {None}
    out = attngen.attention(q, k, v, **called)
    assert out.isfinite().all() and not torch.equal(out, attngen.attention(q, k, v))


def test_call_of_the_page_runs(space) -> None:
    assert space["out"].shape == (1, 64, 4, 64) and space["out"].isfinite().all()
