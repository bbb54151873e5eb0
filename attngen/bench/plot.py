"""Plot: a report as bars, a group a case, with the ceiling as a line."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from ..errors import MeasureError
from .report import DETERMINISTIC, OURS, TITLES, Report, timed

COLOURS = {
    OURS: "#1b6ca8",
    "fa3": "#d9822b",
    "fa4": "#e5b567",
    "cudnn": "#5a9e4b",
    "sdpa": "#8f6bb3",
    "flex": "#9a9a9a",
}
LIGHTER = 0.55  # the opacity of bars of a deterministic mode, in the colour of the ordinary one
GROUP_WIDTH = 0.84  # of the distance between two cases


def check_format(path: Path) -> None:
    """Raises: MeasureError where the file's ending names no format that can be written."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise MeasureError(f"{path}: its ending should be one of {', '.join(sorted(known))}")


def draw(report: Report) -> Figure:
    """The figure; whoever has no figure in a case leaves a gap there."""
    names = timed(report)
    figure = Figure(figsize=(max(6.0, 0.9 * len(report.rows)), 5.0), layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(report.rows))
    width = GROUP_WIDTH / max(1, len(names))
    for number, name in enumerate(names):
        offset = (number + 0.5) * width - GROUP_WIDTH / 2
        heights = [row.tflops.get(name, float("nan")) for row in report.rows]
        label = TITLES[name]
        axes.bar(
            [x + offset for x in positions],
            heights,
            width,
            label=label,
            color=COLOURS[name.removesuffix(DETERMINISTIC)],
            alpha=LIGHTER if name.endswith(DETERMINISTIC) else 1,
        )
    axes.step(
        [x - 0.5 for x in (*positions, len(report.rows))],
        [row.ceiling_tflops for row in (*report.rows, *report.rows[-1:])],
        where="post",
        color="black",
        linestyle="--",
        linewidth=1,
        label=report.ceiling,
    )
    axes.set_xticks(list(positions), [row.case for row in report.rows], rotation=40, ha="right")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{report.direction}, {report.dtype}, {report.machine.chip}, {report.date}")
    axes.set_ylim(bottom=0)
    figure.legend(ncols=len(names) + 1, loc="outside lower center", fontsize="small")
    return figure


def save(report: Report, path: Path) -> None:
    """Write the figure in the format of the file's ending."""
    draw(report).savefig(path, dpi=150)
