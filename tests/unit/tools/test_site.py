"""The site of the docs: links that are right in the repository are right on its pages."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import pytest

pytest.importorskip("mkdocs", reason="the site is built with the docs extra")

from tools import site_hooks  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("text", "source", "page", "wanted"),
    [
        ("[a](docs/guide/specs.md#x)", "README.md", "index.md", "[a](guide/specs.md#x)"),
        ("[a](../../README.md)", "docs/guide/specs.md", "guide/specs.md", "[a](../index.md)"),
        ("[a](specs.md)", "docs/guide/serving.md", "guide/serving.md", "[a](specs.md)"),
        ("![a](docs/results/x.svg)", "README.md", "index.md", "![a](results/x.svg)"),
        ("[a](examples/demo.py)", "README.md", "index.md", "a (`examples/demo.py`)"),
        ("[`LICENSE`](LICENSE)", "README.md", "index.md", "`LICENSE`"),
        ("[a](https://x.org/b.md)", "README.md", "index.md", "[a](https://x.org/b.md)"),
        ("[a](#here)", "README.md", "index.md", "[a](#here)"),
    ],
)
def test_link_of_the_repository_becomes_one_of_the_site(text, source, page, wanted) -> None:
    assert site_hooks.translate(text, PurePosixPath(source), PurePosixPath(page)) == wanted


def test_every_page_has_a_place_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages | set(site_hooks.PAGES.values())
