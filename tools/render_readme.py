"""Write the tables of README.md and of docs from the reports that they name.

A table stands between `<!-- table: docs/results/forward.json -->` and `<!-- end of table -->`; that
of `docs/results`, the folder, sums up its reports, and one whose name ends in `-goals` holds runs
to their goals. `python tools/render_readme.py --check` writes nothing and exits 1 where a table is
not what its reports say.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# The path above serves a checkout that is not installed.
from attngen.bench import decode_report, report  # noqa: E402
from attngen.errors import MeasureError  # noqa: E402
from tools import (  # noqa: E402
    callables_table,
    doors_table,
    goals_table,
    mma_sync_table,
    runs_table,
    speed_summary,
    variant_table,
)

GUIDE = ROOT / "docs" / "guide"
LIMITS = ROOT / "docs" / "internals" / "performance" / "limits.md"
FILES = (ROOT / "README.md", GUIDE / "speed.md", GUIDE / "gpus.md", LIMITS)

_TABLE = re.compile(
    r"(?P<begin><!-- table: (?P<path>\S+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL
)


def render(text: str, root: Path) -> tuple[str, int]:
    """The text with each table written anew, and how many there are.

    Reports are named relative to `root`. Raises: MeasureError, OSError where one cannot be read.
    """

    def table(match: re.Match[str]) -> str:
        body = "\n".join(_lines(root / match["path"]))
        return f"{match['begin']}\n{body}\n\n{match['end']}"

    return _TABLE.subn(table, text)


def _lines(path: Path) -> Iterator[str]:
    """The table of a report of any kind."""
    if goals_table.is_goals(path):
        return goals_table.markdown(path)
    if path.is_dir():
        return speed_summary.markdown(path)
    if path.name == "callables.json":
        return callables_table.markdown(path)
    if path.name == "doors.json":
        return doors_table.markdown(path)
    if path.name.startswith("mma-sync"):
        return mma_sync_table.markdown(path)
    if runs_table.is_again(path):
        return runs_table.markdown(path)
    if path.name == "variant-peers.json":
        return variant_table.markdown(path)
    try:
        return report.markdown(report.read(path))
    except MeasureError:
        return decode_report.markdown(decode_report.read(path))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it differs")
    parser.add_argument("--file", type=Path, action="append", help="Markdown file; may be repeated")
    options = parser.parse_args(arguments)
    return max(bring_up(file, options.check) for file in options.file or FILES)


def bring_up(file: Path, check: bool) -> int:
    """Render a file's tables anew, or only compare; the exit status."""
    text = file.read_text()
    wanted, count = render(text, ROOT)
    if not count:
        print(f"{file} has no table to render", file=sys.stderr)
        return 1
    if not check:
        file.write_text(wanted)
        print(f"{count} tables in {file}")
        return 0
    if wanted != text:
        print(f"{file} is not what its reports say: run `make generated` and commit it")
    return 1 if wanted != text else 0


if __name__ == "__main__":
    sys.exit(main())
