"""Building for `attngen build` and `attngen bundle build`: specs, progress, and the failures last.

Exit code 0: all is there; 1: something was refused or failed.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import AttngenError
from ..io.files import can_write_into
from .output import show

if TYPE_CHECKING:
    from ..compiler.batch import Job, Outcome
    from ..compiler.cache import Cache


@dataclass(frozen=True)
class Request:
    """The options that both commands have."""

    specs: tuple[Path, ...]
    from_trace: Path | None
    arch: str | None
    shard: tuple[int, int]
    jobs: int | None
    dry_run: bool
    as_json: bool


def count_of(number: int, noun: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shard(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    index, slash, count = value.partition("/")
    numbers = slash and all(each.isdecimal() and len(each) <= 9 for each in (index, count))
    if not (numbers and 1 <= int(index) <= int(count)):
        raise click.BadParameter(f"{value!r}: a machine's number and how many, as 2/8", ctx, param)
    return int(index), int(count)


_OPTIONS = (
    click.argument("specs", metavar="[SPEC.toml]...", nargs=-1, type=click.Path(path_type=Path)),
    click.option(
        "--from-trace",
        type=click.Path(path_type=Path),
        help="What `attngen trace` wrote; -: standard input.",
    ),
    click.option("--arch", help="Build for these architectures (A,B), not those of the files."),
    click.option(
        "--shard",
        metavar="I/N",
        default="1/1",
        callback=_shard,
        help="Only the part of machine I of N; `attngen bundle merge` joins their bundles.",
    ),
    click.option("--jobs", type=click.IntRange(min=1), help="Threads; default: one a core."),
    click.option("--dry-run", is_flag=True, help="Say what would be compiled; compile nothing."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
)


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a Request, and the request as its first argument."""

    @functools.wraps(command)  # with the options that it has already
    def with_request(**options: Any) -> None:
        fields = {name: options.pop(name) for name in Request.__dataclass_fields__}
        command(Request(**fields), **options)

    taking: Callable[..., None] = with_request
    for option in reversed(_OPTIONS):
        taking = option(taking)
    return taking


@click.command("build")
@takes_request
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory; default: cache.",
)
def build(request: Request, output: Path | None) -> None:
    """Compile every kernel that the spec files name; no GPU is needed.

    With -o, the kernels are used elsewhere by ATTNGEN_CACHE_DIR=DIRECTORY. What is already there is
    not compiled again, so a build that was interrupted goes on where it was.
    """
    from ..compiler.cache import Cache

    cache = Cache.default() if output is None else Cache(output)
    build_all(request, cache)


def build_all(request: Request, cache: Cache) -> list[Outcome]:
    """Builds what is asked for, showing progress; nothing where it is a dry run.

    Raises: AttngenError with every refusal and failure, once all else is built.
    """
    from ..compiler import batch

    os.environ.pop("ATTNGEN_DISABLE_JIT", None)  # it forbids compiling in a call, not this
    jobs, refused = _find_jobs(request)
    failures = [reason for error in refused for reason in error.reasons]
    outcomes: list[Outcome] = []
    if request.dry_run:
        _show_plan(request, jobs, cache, len(refused))
    elif reason := cache.distrust():
        failures.append(f"{reason}; no kernel is found or kept there")
    elif not can_write_into(cache.root) and (lacking := _lacking(jobs, cache)):
        failures.append(f"{cache.root} cannot be written, and lacks {count_of(lacking, 'kernel')}")
    else:
        start = time.monotonic()
        for outcome in batch.run(jobs, cache, request.jobs):
            outcomes.append(outcome)
            seconds = None if outcome.cached else time.monotonic() - start
            _show(request, outcome, len(outcomes), len(jobs), _left(outcomes, len(jobs), seconds))
        failures += [f"{o.job.name} {o.job.arch}: {o.error}" for o in outcomes if o.error]
        if not request.as_json:
            show(_summary(outcomes, len(refused), cache))
    if failures:
        raise AttngenError(failures)
    return outcomes


def _find_jobs(request: Request) -> tuple[list[Job], list[AttngenError]]:
    from ..compiler import batch
    from ..runtime import tracing
    from ..spec.attention_spec import load_placed

    if not request.specs and request.from_trace is None:
        raise click.UsageError("name spec files, or a trace with --from-trace")
    jobs, refused = batch.jobs_of(load_placed(request.specs), request.arch)
    if request.from_trace is not None:
        variants = tracing.read_places(request.from_trace)
        if not (variants or request.specs):
            why = "no kernel of attngen was launched while it was on"
            raise AttngenError(f"{request.from_trace} names nothing to build: {why}")
        traced, also_refused = batch.jobs_for(variants, "trace", request.arch, variants)
        jobs, refused = batch.join([*jobs, *traced]), [*refused, *also_refused]
    return batch.shard(jobs, *request.shard), refused


def _lacking(jobs: Sequence[Job], cache: Cache) -> int:
    from ..compiler import batch

    return sum(batch.find_cached(job, cache) is None for job in jobs)


def _show_plan(request: Request, jobs: Sequence[Job], cache: Cache, refused: int) -> None:
    from ..compiler import batch

    missing = 0
    for number, job in enumerate(jobs, 1):
        cached = batch.find_cached(job, cache) is not None
        missing += not cached
        if request.as_json:
            show(json.dumps({**_identity(job), "cached": cached}))
        else:
            state = "cached" if cached else "to compile"
            titles = " ".join(job.titles)
            show(f"[{number}/{len(jobs)}] {job.name} {job.arch}  {state}  {titles}")
    if not request.as_json:
        refusals = f", {refused} refused" if refused else ""
        found = len(jobs) - missing
        show(f"{missing} to compile, {found} cached{refusals}, in {cache.root}")


def _left(outcomes: Sequence[Outcome], total: int, elapsed: float | None) -> str:
    """An upper estimate of the time to come, as if the cache had none of the rest."""
    compiled = sum(not outcome.cached for outcome in outcomes)
    if elapsed is None or not compiled or len(outcomes) == total:
        return ""
    seconds = elapsed / compiled * (total - len(outcomes))
    return f", {seconds:.0f} s left" if seconds < 90 else f", {seconds / 60:.0f} min left"


def _show(request: Request, outcome: Outcome, number: int, total: int, left: str) -> None:
    if request.as_json:
        show(_json_line(outcome))
    else:
        show(f"[{number}/{total}{left}] {_text_line(outcome)}")


def _text_line(outcome: Outcome) -> str:
    titles = " ".join(outcome.job.titles)
    if outcome.binary is None or outcome.error:
        return f"FAILED {outcome.job.name} {outcome.job.arch}  {titles}"
    binary = outcome.binary
    how = "cached" if outcome.cached else f"compiled in {outcome.seconds:.2f} s"
    slow = f", {spills}" if (spills := binary.resources.in_local_memory) else ""
    return (
        f"{binary.kernel.entry}  {how}, {binary.resources.registers} registers, "
        f"{binary.resources.cubin_bytes / 1000:.0f} kB{slow}  {titles}"
    )


def _identity(job: Job) -> dict[str, Any]:
    return {
        "specs": job.titles,
        "arch": job.arch,
        "direction": job.problem.direction,
        "label": job.problem.label,
    }


def _json_line(outcome: Outcome) -> str:
    from ..io.values import to_data

    binary = outcome.binary
    return json.dumps(
        {
            **_identity(outcome.job),
            "entry": binary and binary.kernel.entry,
            "cached": binary and outcome.cached,
            "resources": binary and to_data(binary.resources),
            "seconds": round(outcome.seconds, 3),
            "error": outcome.error and str(outcome.error),
        }
    )


def _summary(outcomes: Sequence[Outcome], refused: int, cache: Cache) -> str:
    built = [outcome for outcome in outcomes if outcome.binary and not outcome.error]
    cached = sum(each.cached for each in built)
    failed = len(outcomes) - len(built) + refused
    failed_text = f", {failed} failed" if failed else ""
    return f"{len(built) - cached} compiled, {cached} cached{failed_text}, in {cache.root}"
