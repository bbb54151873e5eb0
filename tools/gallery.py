"""Writes docs/guide/gallery.md: masks and scores as callables, each with its picture and its speed.

    python tools/gallery.py [--check]

The functions are those of tools/callable_cases.py, pictures those of 64 queries and keys, speeds
those of docs/results/callables.json. `--check` writes nothing and exits 1 where a file differs.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tools.callable_cases import CAP, CASES, SOFT, At, Case, Make  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "gallery.md"
PICTURES = ROOT / "docs" / "guide" / "gallery"
REPORT = ROOT / "docs" / "results" / "callables.json"
LENGTH, CELL, LEVELS = 64, 3, 5
HEAD = """# Masks and scores

<!-- Written by tools/gallery.py; do not edit. -->

Twenty functions for `score_mod` and `mask_mod`, and how fast they run: {case}, forward and backward
with gradients of what they learn, beside FlexAttention compiled; {chip}, {date}, torch {torch}.
[FlexAttention](flex-attention.md) says what functions may do,
[results](../results/README.md#callablesjson) how they were timed. In pictures queries go down and
keys across; darker is larger, of masks what takes part. The page's code runs as it stands, from
here to [a call](#in-a-call). Each function takes the sizes of a call and returns its arguments:

```python
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attngen

CAP, SOFT = {cap}, {soft}


{at}

{case_class}```
"""
CALL = """## In a call

```python
at = At(batch=1, heads=4, length=64, device="cuda" if torch.cuda.is_available() else "cpu")
q, k, v = torch.randn(3, at.batch, at.length, at.heads, 64, device=at.device).bfloat16()
given = relative(at)
out = attngen.attention(q, k, v, score_mod=given.score_mod, mask_mod=given.mask_mod)
```
"""


def case_of(make: Make) -> Case:
    """The case of a picture."""
    return make(At(1, 4, LENGTH, "cpu"))


def picture(case: Case) -> str:
    """The picture of a case, SVG: its mask, what becomes of a score of 1 at each place, or, where
    that is the same everywhere, of each score."""
    b, h = (torch.zeros((), dtype=torch.int32) for _ in "bh")
    i, j = (x.int() for x in torch.meshgrid(*[torch.arange(LENGTH)] * 2, indexing="ij"))
    with torch.no_grad():
        if case.mask_mod is not None:
            return cells(torch.where(case.mask_mod(b, h, i, j), LEVELS - 1, 0))
        assert case.score_mod is not None
        of_one = case.score_mod(torch.ones(LENGTH, LENGTH), b, h, i, j).float()
        least, most = of_one.min(), of_one.max()
        if least == most:
            scores = torch.linspace(-64, 64, LENGTH)
            return curve(case.score_mod(scores, b, h, i[0], j[0]).tolist())
        return cells(((of_one - least) / (most - least) * (LEVELS - 1)).round().int())


def cells(levels: torch.Tensor) -> str:
    """A picture of whole numbers below LEVELS, [rows, columns]: runs of a row are one line."""
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(levels.tolist()):
        begin = 0
        for column in range(1, len(line) + 1):
            if column == len(line) or line[column] != line[begin]:
                if line[begin]:
                    run = f"M{begin} {row}h{column - begin}"
                    paths.setdefault(line[begin], []).append(run)
                begin = column
    lines = [
        f'<path stroke="#1f4e79" stroke-opacity="{level / (LEVELS - 1):.3g}" d="{"".join(runs)}"/>'
        for level, runs in sorted(paths.items())
    ]
    return _framed(f'<g transform="translate(0 .5)">{"".join(lines)}</g>')


def curve(values: list[float]) -> str:
    """A picture of a function's values, the first ones of its least arguments."""
    most = max(map(abs, values))
    places = (f"{x} {LENGTH / 2 * (1 - 0.9 * y / most):.1f}" for x, y in enumerate(values))
    return _framed(f'<polyline fill="none" stroke="#1f4e79" points="{",".join(places)}"/>')


def _framed(inner: str) -> str:
    side = LENGTH * CELL
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" '
        f'viewBox="0 0 {LENGTH} {LENGTH}"><rect width="{LENGTH}" height="{LENGTH}" fill="#fff" '
        f'stroke="#999" stroke-width=".5"/>{inner}</svg>\n'
    )


def speeds_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Sentences on the speeds of a case's rows, the forward's first."""
    words = {"fwd": "forward", "bwd": "backward"}
    pairs = [f"{words[row['direction']]} {row['to_flex']:.2f}" for row in rows if "to_flex" in row]
    if pairs:
        yield f"{' and '.join(pairs).capitalize()} times as fast as FlexAttention."
    elif rows:
        ms = (f"{words[row['direction']]} {row['ms']['attngen']:.3g} ms" for row in rows)
        yield f"{', '.join(ms).capitalize()}; FlexAttention has no kernel for it."
    pairs = [f"{row['to_built_in']:.2f}" for row in rows if "to_built_in" in row]
    if pairs:
        yield f"Beside attngen's own argument for the same: {' and '.join(pairs)}."


def files() -> dict[Path, str]:
    """The page and its pictures."""
    report = json.loads(REPORT.read_text())
    machine = report["machine"]
    told = {"case": report["case"], "chip": machine["chip"], "torch": machine["torch"]}
    told |= {"cap": CAP, "soft": SOFT, "at": inspect.getsource(At)}
    told["case_class"] = inspect.getsource(Case)
    page, found = [HEAD.format(date=report["date"], **told)], {}
    for name, make in CASES.items():
        case = case_of(make)
        found[PICTURES / f"{name}.svg"] = picture(case)
        head, _, rest = inspect.getsource(make).partition('"""')
        doc, _, body = rest.partition('"""\n')
        title = name.replace("_", " ").capitalize()
        rows = [x for x in report["rows"] if x["case"] == name and x["direction"] in ("fwd", "bwd")]
        text = " ".join(
            [" ".join(doc.split()), *speeds_of([x for x in rows if "attngen" in x["ms"]])]
        )
        page.append(
            f"## {title}\n\n![{title}](gallery/{name}.svg)\n\n{textwrap.fill(text, 130)}\n\n"
            f"```python\n{head.strip()}\n{body.rstrip()}\n```\n"
        )
    return {PAGE: "\n".join([*page, CALL]), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it differs")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    status = 0
    for path, text in files().items():
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} is not what its tool writes: run `make generated` and commit it")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
