"""docs/guide/specs.md: its file is legal, its table has every field of a spec with its default."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from attngen.fragments import features
from attngen.spec import resolve
from attngen.spec.attention_spec import AttentionSpec, load_specs
from attngen.spec.fragment_checks import mask_names
from attngen.spec.listing import list_features
from tests.support.own_fragments import kept
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "specs.md").read_text()


def rows() -> dict[str, str]:
    """Field → default, as the table has them."""
    found = {}
    for names, default in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", PAGE, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), default)
    return found


def test_specs_of_the_page_have_kernels_and_the_names_that_it_says(tmp_path: Path) -> None:
    block, functions = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "specs.toml").write_text(block)
    specs = load_specs(tmp_path / "specs.toml")
    assert {"train-64", "train-128", "serve-window-bshd"} <= {spec.title for spec in specs}
    (mods,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mods.py").write_text(f"import torch\n\n{mods}")
    (tmp_path / "functions.toml").write_text(functions)
    with kept():
        (relative,) = load_specs(tmp_path / "functions.toml")
        assert relative.window and isinstance(relative.score_mod, str)
        for spec in (*specs, relative):
            assert not resolve.find_violations(spec, features.scan())


def test_table_has_every_field_with_its_default() -> None:
    fields = dataclasses.fields(AttentionSpec)
    assert rows().keys() == {field.name for field in fields}
    for field in fields:
        if field.default is not None and field.default is not dataclasses.MISSING:
            assert rows()[field.name] == f"`{json.dumps(field.default)}`", field.name


def test_list_prints_what_fields_may_hold() -> None:
    known = features.scan()
    words = {*"\n".join(list_features(known)).partition("\n\n")[0].split()}
    switches = {f.name for f in dataclasses.fields(AttentionSpec) if f.default is False}
    assert switches - {*resolve.SWITCHES} <= words
    assert {*mask_names(known), *resolve.BIASES, "paged_kv_thd_bshd_bshd"} <= words
