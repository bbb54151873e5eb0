"""Plot: a report as bars, a group a case, with the ceiling as a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from ..errors import MeasureError
from ..io.files import read_regular, replacing
from ..io.text import printable
from . import decode_report
from .report import DETERMINISTIC, OURS, TITLES, Report

COLOURS = {
    OURS: "#1b6ca8",
    "fa3": "#d9822b",
    "fa4": "#e5b567",
    "cudnn": "#5a9e4b",
    "cudnn-paged": "#a9cf9c",
    "sdpa": "#8f6bb3",
    "efficient": "#b39b6b",
    "flex": "#9a9a9a",
    "flashinfer": "#e5b567",
    "xla": "#c76b8e",
    "tokamax": "#6bb3a8",
}
LIGHTER = 0.55  # the opacity of bars of a deterministic mode, in the colour of the ordinary one
MOST_BYTES = 1 << 26  # of a figure
FIGURE = "figure of attngen's"
_MAKER = {"png": "Software", **dict.fromkeys(("svg", "pdf", "ps", "eps"), "Creator")}
GROUP_WIDTH = 0.84  # of the distance between two cases
ROW_LIMIT = 200


def check_format(path: Path) -> None:
    """Raises: MeasureError where the file's ending names no format that can be written."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise MeasureError(f"{path}: its ending should be one of {', '.join(sorted(known))}")


def draw(report: Report | decode_report.Report) -> Figure:
    """The figure; whoever has no figure in a case leaves a gap there.

    Raises: MeasureError where there are no rows, or more than a figure has room for.
    """
    if not 0 < len(report.rows) <= ROW_LIMIT:
        raise MeasureError(f"{len(report.rows)} rows: a figure has 1 to {ROW_LIMIT}")
    if isinstance(report, Report):
        rates = [row.tflops for row in report.rows]
        ceilings, ceiling = [row.ceiling_tflops for row in report.rows], report.ceiling
        titles, unit, what = TITLES, "TFLOP/s", report.direction
    else:
        rates = [row.gbps for row in report.rows]
        ceilings, ceiling = [row.copy_gbps for row in report.rows], "copy, read and written"
        titles, unit, what = decode_report.TITLES, "GB/s of keys and values", "decode"
    names = [name for name in titles if any(name in row for row in rates)]
    figure = Figure(figsize=(max(6.0, 0.9 * len(rates)), 5.0), layout="constrained")
    axes = figure.add_subplot()
    _draw_bars(axes, rates, {name: titles[name] for name in names})
    axes.step(
        [x - 0.5 for x in range(len(rates) + 1)],
        [*ceilings, *ceilings[-1:]],
        where="post",
        color="black",
        linestyle="--",
        linewidth=1,
        label=_plain(ceiling),
    )
    cases = [_plain(row.case) for row in report.rows]
    axes.set_xticks(range(len(rates)), cases, rotation=40, ha="right")
    axes.set_ylabel(unit)
    title = f"{what}, {report.dtype}, {report.machine.chip}, {report.date}"
    axes.set_title(_plain(title))
    axes.set_ylim(bottom=0)
    figure.legend(ncols=len(names) + 1, loc="outside lower center", fontsize="small")
    return figure


def _plain(text: str) -> str:
    """The text with signs that matplotlib would take for mathematics escaped."""
    return printable(text).replace("$", r"\$")


def _draw_bars(axes: Axes, rates: list[dict[str, float]], titles: dict[str, str]) -> None:
    """A group of bars a case; titles: in the order of the bars."""
    width = GROUP_WIDTH / max(1, len(titles))
    for number, (name, title) in enumerate(titles.items()):
        offset = (number + 0.5) * width - GROUP_WIDTH / 2
        axes.bar(
            [x + offset for x in range(len(rates))],
            [row.get(name, float("nan")) for row in rates],
            width,
            label=title,
            color=COLOURS[name.removesuffix(DETERMINISTIC)],
            alpha=LIGHTER if name.endswith(DETERMINISTIC) else 1,
        )


def save(report: Report | decode_report.Report, path: Path) -> None:
    """Write the figure in the format of the file's ending.

    Raises: OSError, also over a file that is no figure of attngen's.
    """
    ending = path.suffix[1:].lower()
    named: dict[str, Any] = {"metadata": {_MAKER[ending]: "attngen"}} if ending in _MAKER else {}
    with replacing(path, is_figure, FIGURE) as file:
        draw(report).savefig(file, dpi=150, format=ending, **named)


def is_figure(path: Path) -> bool:
    """Whether a file names attngen, as figures do: as their maker, or in a legend."""
    try:
        return b"attngen" in read_regular(path, MOST_BYTES)
    except OSError:
        return False
