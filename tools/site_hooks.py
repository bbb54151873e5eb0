"""Hooks of the documentation site: pages at the repository's root, and links out of docs/.

README, CONTRIBUTING, SECURITY and CHANGELOG are pages of the site, too. A link to a file that is no
page (an example, a source, a folder) becomes its path, as code, since the site has no place for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
SHOWN = {".svg", ".png"}  # of docs/, which the site has
_LINK = re.compile(r"(!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie at the root of the repository."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links as they are right in the repository into links of the site."""
    at_root = {name: source for source, name in PAGES.items()}
    source = PurePosixPath(at_root.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    return translate(markdown, source, PurePosixPath(page.file.src_uri))


def translate(markdown: str, source: PurePosixPath, page: PurePosixPath) -> str:
    """The page's text with its links made the site's.

    source: where the text lies in the repository; page: where among the site's pages.
    """

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(source.parent / match["path"])
        if target in PAGES:
            target = f"docs/{PAGES[target]}"
        is_page = target.startswith("docs/") and PurePosixPath(target).suffix in {".md", *SHOWN}
        if not is_page:
            shown = match["text"].strip("`")
            return f"`{target}`" if shown == target else f"{match['text']} (`{target}`)"
        inside = os.path.relpath(target.removeprefix("docs/"), page.parent)
        return f"{match[1]}[{match['text']}]({inside}{match['anchor'] or ''})"

    return _LINK.sub(link, markdown)
