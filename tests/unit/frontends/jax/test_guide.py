"""The guide's code runs as it stands."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("jax")

from tests.support.paths import ROOT  # noqa: E402


def test_code_of_the_guide_runs() -> None:
    text = (ROOT / "docs" / "guide" / "jax.md").read_text()
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, space)
    assert [x.shape for x in space["gradients"]] == [(2, 64, 8, 64), *[(2, 64, 2, 64)] * 2]
