"""The examples of docs/guide/serving.md: the specs are legal, and the call runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import attngen
from attngen.fragments import features
from attngen.spec import resolve
from attngen.spec.attention_spec import load_specs
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "serving.md").read_text()


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_specs_of_the_page_have_kernels_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(block("toml"))
    specs = load_specs(tmp_path / "serve.toml")
    assert {(spec.layout, spec.decode) for spec in specs} == {
        (f"paged_kv_{q}_bshd_bshd", decode) for q in ("bshd", "thd") for decode in (False, True)
    }
    for spec in specs:
        assert not resolve.find_violations(spec, features.scan())


def test_call_of_the_page_gives_what_dense_keys_give() -> None:
    k, v = (torch.randn(1, 5, 2, 16) for _ in "kv")
    pages = [torch.full((4, 4, 2, 16), float("nan")) for _ in "kv"]
    for paged, dense in zip(pages, (k, v), strict=True):
        paged[3], paged[1, 0] = dense[0, :4], dense[0, 4]
    q = torch.randn(1, 2, 4, 16)
    given = {"q": q, "k_pages": pages[0], "v_pages": pages[1], "attngen": attngen}
    given["table"] = torch.tensor([[3, 1, 99]], dtype=torch.int32)
    given["lengths"] = torch.tensor([5], dtype=torch.int32)
    exec(block("python"), given)
    wanted = attngen.attention(q, k, v, mask="causal_bottom_right")
    assert torch.equal(given["out"], wanted)
