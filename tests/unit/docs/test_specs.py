"""Functions that the page on spec files names become what it says."""

from __future__ import annotations

import re
from pathlib import Path

from attngen.spec.attention_spec import load_specs
from tests.support.own_fragments import kept
from tests.support.paths import ROOT


def test_functions_of_the_page_are_read(tmp_path: Path) -> None:
    section = (ROOT / "docs/guide/specs.md").read_text().partition("\n## Functions\n")[2]
    (spec,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "mods.py").write_text(f"import torch\n\n{code}")
    (tmp_path / "specs.toml").write_text(spec)
    with kept():
        found, *others = load_specs(tmp_path / "specs.toml")
    assert found.window and not others
    assert str(found.score_mod).startswith("traced_learned_")  # a program of what has a gradient
