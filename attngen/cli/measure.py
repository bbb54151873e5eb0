"""The commands that measure on a GPU: `attngen bench` and `attngen tune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from ..errors import AttngenError, MeasureError
from ..io.files import require_own
from .output import FiniteFloat, show

if TYPE_CHECKING:
    from ..bench import decode_report
    from ..bench.peers import Peer, Through
    from ..bench.report import Report, Row
    from ..bench.workloads import Case


def _words(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The words between commas. Raises: click.BadParameter where one is missing."""
    words = () if value is None else tuple(word.strip() for word in value.split(","))
    if not all(words):
        raise click.BadParameter(f"{value!r}: a word is missing at a comma", ctx, param)
    return words


_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
output_file = click.Path(path_type=Path, dir_okay=False, writable=True)


@click.group("bench")
def bench() -> None:
    """Time attngen's kernels beside public ones, and draw the figures."""


def _measures(peers: str) -> _Decorator:
    """The options of every benchmark; peers: whom it times where none are named."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        named = click.option(
            "--peers",
            metavar="NAME,...",
            callback=_words,
            default=peers,
            show_default=True,
            help="Whom to time beside attngen.",
        )
        for option in reversed((_OPTIONS[0], named, *_OPTIONS[1:])):
            command = option(command)
        return command

    return add


def _takes_rounds(default: int, text: str) -> _Decorator:
    least_one = click.IntRange(min=1)
    return click.option("--rounds", type=least_one, default=default, show_default=True, help=text)


def _takes_budget(default: float, text: str) -> _Decorator:
    some = FiniteFloat(min=0.1)
    return click.option("--budget-ms", type=some, default=default, show_default=True, help=text)


_SHORT = {"rounds": 5, "budget_ms": 40.0}  # of `--through call`
_EPILOG = (
    "FlashAttention-3 is found as flash_attn_interface, inside xformers, or as the library "
    "with the flash_attn_3 operators that ATTNGEN_FA3_LIBRARY names."
)
_OPTIONS = (
    click.option(
        "--cases",
        "patterns",
        metavar="PATTERN,...",
        callback=_words,
        help="Only cases whose names fit one of these, as *d128* or b4-*-causal.",
    ),
    _takes_rounds(9, "Measurements of each, in a shuffled order."),
    _takes_budget(25.0, "GPU time of one measurement in a round."),
    click.option("--json", "json_file", type=output_file, help="Write the report here."),
    click.option(
        "--plot", "plot_file", type=output_file, help="Draw it here: .png, .svg, .pdf, ..."
    ),
)


class Subject(NamedTuple):
    """A direction, the front end whose calls of it are timed, and what they go through there."""

    direction: str
    frontend: str
    through: Through


_frontend = click.option(
    "--frontend",
    type=click.Choice(["pytorch", "jax"]),
    default="pytorch",
    show_default=True,
    help="Whose calls are timed. In jax the peers are cudnn and xla, of jax.nn.",
)


_through = click.option(
    "--through",
    type=click.Choice(["operator", "call"]),
    default="operator",
    show_default=True,
    help="What attngen's backward is: its operator, or autograd's of the public call, which the "
    "forward is either way. With call rounds are short, 5 of 40 ms unless told. In jax all is "
    "through the call.",
)
_energy = click.option("--energy", is_flag=True, help="Measure joules of a call, too.")


@bench.command("fwd", epilog=_EPILOG)
@_frontend
@_through
@_energy
@_measures("sdpa,cudnn,fa3,fa4,flex")
def bench_fwd(frontend: str, through: Through, **options: Any) -> None:
    """Time the forward pass beside its peers, in interleaved rounds.

    Every result is checked against float64 before it is timed. A peer that is not installed is
    named with the reason. Exits with 1 where attngen itself has no figure.
    """
    _bench(Subject("fwd", frontend, through), deterministic=False, **options)


@bench.command("bwd", epilog=_EPILOG)
@_frontend
@_through
@_energy
@click.option(
    "--deterministic", is_flag=True, help="Time modes that repeat bit for bit, too, as NAME-det."
)
@_measures("sdpa,cudnn,fa3,fa4,flex")
def bench_bwd(frontend: str, through: Through, **options: Any) -> None:
    """Time the backward pass alone beside its peers, in interleaved rounds.

    Each starts from the output and LSE of its own forward, which is not timed; what follows is as
    for `bench fwd`.
    """
    _bench(Subject("bwd", frontend, through), **options)


def _bench(
    subject: Subject,
    patterns: Sequence[str],
    peers: Sequence[str],
    json_file: Path | None,
    plot_file: Path | None,
    **manner: Any,
) -> None:
    """Measures, prints and writes. manner: as `run.Manner`. Raises: MeasureError where attngen
    itself has no figure."""
    from ..bench import workloads

    if subject.frontend == "jax" and _was_given("through"):
        raise click.UsageError("--through is of PyTorch's calls; in jax leave it out")
    cases = workloads.select(patterns)
    _prepare(json_file, plot_file)
    report = _measure(subject, cases, peers, manner)
    if json_file:
        from ..bench.report import save

        save(report, json_file)
    if plot_file:
        from ..bench import plot

        plot.save(report, plot_file)
    _require_figures(report.rows, len(cases))


def _prepare(json_file: Path | None, plot_file: Path | None) -> None:
    """Check that the files can be written, before anything is timed."""
    if plot_file:
        from ..bench import plot

        plot.check_format(plot_file)
        require_own(plot_file, plot.is_figure, plot.FIGURE)
    if json_file:
        from ..bench.report import is_report

        require_own(json_file, is_report, "report")
    for path in (json_file, plot_file):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)


def _require_figures(rows: Sequence[Row | decode_report.Row], cases: int) -> None:
    lacking = [row.case for row in rows if "attngen" in row.missing]
    if lacking:
        raise MeasureError(f"attngen has no figure in {', '.join(lacking)}")
    if len(rows) < cases:
        raise MeasureError(f"stopped: {len(rows)} of {cases} cases were timed")


@bench.command(
    "decode",
    epilog="FlashAttention-3's operators are found inside xformers, or in the library that "
    "ATTNGEN_FA3_LIBRARY names.",
)
@_measures("fa3,cudnn,flashinfer")
def bench_decode(
    patterns: Sequence[str],
    peers: Sequence[str],
    rounds: int,
    budget_ms: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Time one query a sequence over pages of keys, beside peers over pages and dense ones.

    GPU times are those of calls in CUDA graphs; host times of calls outside them stand apart.
    Results are checked and peers named as for `bench fwd`.
    """
    from ..bench import decode_report, workloads

    cases = workloads.select_named(patterns, decode_report.CASES)
    _prepare(json_file, plot_file)
    from ..bench import decode, report, run
    from ..bench.peers import require_known

    require_known(decode.LOADERS, peers)
    run.require_gpu()
    found, absent = decode.load(peers)
    columns = (report.OURS, *found)
    show(decode_report.text_header(columns))
    measured = decode.run(
        *(cases, found, absent, rounds, budget_ms),
        progress=lambda row: show(decode_report.text_row(row, columns)),
    )
    for line in decode_report.text_summary(measured):
        show(line)
    if json_file:
        decode_report.save(measured, json_file)
    if plot_file:
        from ..bench import plot

        plot.save(measured, plot_file)
    _require_figures(measured.rows, len(cases))


@bench.command("plot")
@click.argument("report_file", metavar="REPORT.json", type=click.Path(path_type=Path))
@click.argument("output", metavar="FILE", type=output_file)
def bench_plot(report_file: Path, output: Path) -> None:
    """Draw a report that `--json` wrote, on a machine that needs no GPU."""
    from ..bench import decode_report, plot, report

    plot.check_format(output)
    found: report.Report | decode_report.Report
    try:
        found = report.read(report_file)
    except MeasureError as of_calls:
        try:
            found = decode_report.read(report_file)
        except MeasureError as of_decode:
            raise MeasureError([*of_calls.reasons, *of_decode.reasons]) from of_decode
    plot.save(found, output)


def _measure(
    subject: Subject,
    cases: Sequence[Case],
    names: Sequence[str],
    given: dict[str, Any],
) -> Report:
    """Time the cases, printing each row as it comes."""
    from ..bench import report, run

    found, absent = _load(subject, names)
    if subject.through == "call":
        given |= {name: x for name, x in _SHORT.items() if not _was_given(name)}
    manner = run.Manner(through=subject.through, **given)
    columns = tuple(run.participants(subject.direction, found, manner))
    show(report.text_header(columns))
    measured = run.run(
        *(subject.direction, cases, found, absent, manner),
        progress=lambda so_far: show(report.text_row(so_far.rows[-1], columns)),
    )
    for line in report.text_summary(measured):
        show(line)
    return measured


def _load(subject: Subject, names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers in a front end, itself among them where it is not PyTorch, and why others are
    absent. Raises: MeasureError where nothing can be timed."""
    from ..bench import peers, run

    if subject.frontend == "pytorch":
        peers.require_known(peers.LOADERS, names)
        run.require_gpu()
        return peers.load(names)
    from ..bench import in_jax
    from ..bench.report import OURS

    if not _was_given("peers"):
        names = ("cudnn",)
    peers.require_known(in_jax.LOADERS, names)
    run.require_gpu()
    in_jax.require_cuda()
    found, absent = peers.load_from(in_jax.LOADERS, names)
    return {OURS: in_jax.ours(), **found}, absent


def _was_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT


def _lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    words = _words(ctx, param, value)
    if not all(word.isdecimal() and len(word) <= 9 and int(word) for word in words):
        raise click.BadParameter(
            f"{value!r}: positive numbers with commas between them", ctx, param
        )
    return tuple(map(int, words))


@click.command("tune")
@click.argument(
    "specs", metavar="SPEC.toml...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--lengths",
    metavar="N,...",
    callback=_lengths,
    default="512,4096,16384",
    show_default=True,
    help="Queries and keys of the sequences that are timed.",
)
@click.option(
    "--window",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    help="Keys on each bounded side of a window.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first plans of a problem.")
@_takes_rounds(5, "Measurements of each plan.")
@_takes_budget(10.0, "GPU time of one measurement.")
@click.option("-o", "--output", type=output_file, help="Default: the package's file of this chip.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a problem.")
def tune_(
    specs: Sequence[Path],
    lengths: tuple[int, ...],
    window: int,
    limit: int | None,
    rounds: int,
    budget_ms: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time the plans that fit each kernel of the spec files, and keep what was found.

    From then on planning prefers the fastest. Results are compared before anything is timed.
    """
    from ..bench import tune
    from ..compiler import batch
    from ..io.values import to_json
    from ..kernels import tuned
    from ..spec.attention_spec import load_placed

    wanted = load_placed(specs)
    arch, chip = tune.current_device()
    jobs, refused = batch.jobs_of(wanted, arch)
    if refused:
        raise AttngenError([reason for error in refused for reason in error.reasons])
    effort = tune.Effort(lengths, window, limit, rounds, budget_ms)
    path = output or tuned.FOLDER / f"{tuned.slug(chip)}.json"
    if path.exists():
        tuned.read(path)  # something else in its place shows before anything is timed
    firsts = {(job.problem, job.arch): job for job in reversed(jobs)}  # kernels of their problems
    for job in reversed(firsts.values()):
        if not tune.serves(job.problem):
            show(f"{job.name}: left out; only plain dense forwards are tuned", err=True)
            continue
        tuning = tune.tune(job.problem, job.arch, effort)
        tuned.write(path, chip, [tuning.entry])
        for line in [to_json(tuning.entry)] if as_json else tuning.text(shown=5):
            show(line)
    if not as_json:
        show(f"wrote {path}")
