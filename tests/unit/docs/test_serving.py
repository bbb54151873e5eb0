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


def block(language: str, word: str = "") -> str:
    """The one block of a language that has a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = (each for each in blocks if word in each)
    return str(found)


def test_specs_of_the_page_have_kernels_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(block("toml"))
    specs = load_specs(tmp_path / "serve.toml")
    of_calls = [spec for spec in specs if spec.directions == ("fwd",)]
    assert len(of_calls) == len(specs) - 1
    assert {(spec.layout, spec.decode) for spec in of_calls} == {
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
    exec(block("python", "attngen.attention"), given)
    wanted = attngen.attention(q, k, v, mask="causal_bottom_right")
    assert torch.equal(given["out"], wanted)


def test_append_of_the_page_writes_to_pages() -> None:
    k, v, q = (torch.randn(1, 2, heads, 16) for heads in (2, 2, 4))
    pages = [torch.zeros(4, 4, 2, 16) for _ in "kv"]
    given = {"k_pages": pages[0], "v_pages": pages[1], "k": k, "v": v, "q": q, "attngen": attngen}
    given |= {"table": torch.tensor([[3, 1]], dtype=torch.int32)}
    given |= {"cos": torch.ones(8, 8), "sin": torch.zeros(8, 8)}
    given["lengths_before"] = torch.tensor([3], dtype=torch.int32)
    exec(block("python", "append_kv"), given)
    assert torch.equal(given["turned"], q)
    for paged, new in zip(pages, (k, v), strict=True):
        assert torch.equal(torch.stack([paged[3, 3], paged[1, 0]]), new[0])
        assert paged.count_nonzero() == new.numel()
