"""Decode report: what reading keys and values took, as a value with a JSON form and as text.

Needs no torch. Ratios and means are those of `report`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..io.values import to_json
from .report import OURS, Machine, Mean, geometric_means, read_as, write

SCHEMA = 1
CASE_WIDTH = 24  # of a text column
TITLES = {
    OURS: "attngen",
    "fa3": "FA3 paged",
    "flashinfer": "FlashInfer paged",
    "cudnn-paged": "cuDNN paged",
    "cudnn": "cuDNN dense",
}


@dataclass(frozen=True)
class Case:
    """One query of each sequence, bf16, against `length` keys in pages of `page` positions."""

    batch: int
    heads_q: int
    heads_kv: int
    length: int
    page: int = 64
    head_dim: int = 128

    @property
    def name(self) -> str:
        """`b64-h64/8-kv8k-p64`."""
        return (
            f"b{self.batch}-h{self.heads_q}/{self.heads_kv}-kv{self.length // 1024}k-p{self.page}"
        )

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        return 2 * 2 * self.batch * self.heads_kv * self.length * self.head_dim


_SHAPES = (  # batch, heads of Q, of K and V, keys
    *((64, 64, 8, 8192), (16, 64, 8, 8192)),
    *((1, 64, 8, 65536), (1, 64, 8, 131072), (64, 16, 16, 4096)),
)
CASES = tuple(Case(*shape, page) for shape in _SHAPES for page in (64, 16, 256))


@dataclass(frozen=True)
class Row:
    """One case. `us`: median GPU time of each, in a CUDA graph; `gbps`: keys and values read in
    it; `host_us`: median host time of a call outside graphs; `copy_gbps`: bytes read and written
    by a copy measured between them, `share` attngen's part of it; `ratio`: attngen's rate over
    that of `best_peer`; `missing`: who has no figure here, and why."""

    case: str
    bytes: int
    us: dict[str, float]
    gbps: dict[str, float]
    host_us: dict[str, float]
    copy_gbps: float
    share: float | None
    best_peer: str | None
    ratio: float | None
    missing: dict[str, str]


@dataclass(frozen=True)
class Report:
    """One run. `peers`, `absent` and `means` as in `report.Report`."""

    schema: int
    date: str
    dtype: str
    machine: Machine
    rounds: int
    budget_ms: float
    peers: dict[str, str]
    absent: dict[str, str]
    rows: tuple[Row, ...]
    means: dict[str, Mean]


def make_row(
    case: Case,
    us: Mapping[str, float],
    host_us: Mapping[str, float],
    copy_gbps: float,
    missing: Mapping[str, str],
) -> Row:
    """The row of these median times."""
    rates = {name: case.bytes / each / 1e3 for name, each in us.items()}
    best = max((name for name in rates if name != OURS), key=lambda name: rates[name], default=None)
    own = rates.get(OURS)
    return Row(
        case=case.name,
        bytes=case.bytes,
        us={name: round(each, 2) for name, each in us.items()},
        gbps={name: round(each) for name, each in rates.items()},
        host_us={name: round(each, 1) for name, each in host_us.items()},
        copy_gbps=round(copy_gbps),
        share=None if own is None else round(own / copy_gbps, 3),
        best_peer=best,
        ratio=None if own is None or best is None else round(own / rates[best], 3),
        missing=dict(missing),
    )


def means_of(rows: Sequence[Row]) -> dict[str, Mean]:
    """For each peer of the rows, and for `best`, the mean of attngen's rate over its rate."""
    return geometric_means(row.us for row in rows)


def save(report: Report, path: Path) -> None:
    """Write the report's JSON form. Raises: OSError, also over a file that is no report."""
    write(to_json(report, indent=1), path)


def read(path: Path) -> Report:
    """Read what `save` wrote. Raises: MeasureError where the file is no such report."""
    return read_as(Report, path, "attngen bench decode", SCHEMA)


def text_header(names: Sequence[str]) -> str:
    """The line above those of `text_row`; names: attngen and its peers, in order."""
    figures = "".join(f"{name:>{_width(names)}}" for name in names)
    return f"{'GB/s':<{CASE_WIDTH}}{figures}{'copy':>7}{'share':>7}{'vs best':>9}  host µs"


def text_row(row: Row, names: Sequence[str]) -> str:
    """A case's figures as one line, then a line for each that has none."""
    figures = "".join(f"{_number(row.gbps.get(name), '.0f'):>{_width(names)}}" for name in names)
    host = " ".join(f"{name} {us:.1f}" for name, us in row.host_us.items())
    line = (
        f"{row.case:<{CASE_WIDTH}}{figures}{row.copy_gbps:>7.0f}"
        f"{_number(row.share, '.0%'):>7}{_number(row.ratio, '.3f'):>9}  {host}"
    )
    return "\n".join([line, *(f"  {name}: {why}" for name, why in row.missing.items())])


def text_summary(report: Report) -> Iterator[str]:
    """The means, a line each, and who was absent."""
    for name, mean in report.means.items():
        whom = "the best peer of each row" if name == "best" else name
        yield f"{mean.ratio:.3f} x {whom}, geometric mean of {mean.rows} rows"
    for name, why in report.absent.items():
        yield f"absent: {name}: {why}"


def markdown(report: Report) -> Iterator[str]:
    """The table of a README: figures, the best of a row in bold, then the means and what ran."""
    names = [name for name in TITLES if any(name in row.gbps for row in report.rows)]
    titles = [TITLES[name] for name in names]
    columns = ["case", *titles, "of a copy", "to best peer", "host µs", "FA3 host µs"]
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    for row in report.rows:
        best = max(row.gbps.values(), default=0.0)
        rates = [(row.gbps.get(name), _number(row.gbps.get(name), ".0f")) for name in names]
        figures = [f"**{text}**" if rate == best else text for rate, text in rates]
        host = [_number(row.host_us.get(name), ".1f") for name in (OURS, "fa3")]
        share, ratio = _number(row.share, ".0%"), _number(row.ratio, ".2f")
        yield f"| {' | '.join([f'`{row.case}`', *figures, share, ratio, *host])} |"
    means = [report.means.get(name) for name in (*names[1:], "best")]
    cells = ["–" if mean is None else f"{mean.ratio:.3f}" for mean in means]
    cells = ["attngen to it, geometric mean", "", *cells[:-1], "", cells[-1], "", ""]
    yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        f"GB/s of keys and values in {report.dtype}, {report.machine.chip}, {report.date}: calls "
        f"in CUDA graphs, medians of {report.rounds} rounds in shuffled order; torch "
        f"{report.machine.torch}, driver {report.machine.driver}. A copy measured between them "
        f"reads and writes {statistics.median(row.copy_gbps for row in report.rows):.0f} in the "
        "median. Host: a call outside graphs."
    )
    sources = [f"{TITLES[name]}: {source}" for name, source in report.peers.items()]
    absent = [f"{TITLES[name]} was absent" for name in report.absent]
    yield "; ".join([*sources, *absent]) + "."


def _width(names: Sequence[str]) -> int:
    return max(7, max(len(name) for name in names) + 1)


def _number(figure: float | None, form: str) -> str:
    return "–" if figure is None else format(figure, form)
