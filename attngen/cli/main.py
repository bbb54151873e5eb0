"""The attngen command. Each command imports what it needs; none imports torch."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..errors import AttngenError, SpecError, install_command
from ..io.files import creating, replacing
from ..io.text import printable, printable_lines, suggestion
from .build import build, count_of
from .bundle import bundle, trace
from .measure import bench, tune_
from .output import CommandError, FiniteFloat, PrintableFormatter, fitted, prepare, show, show_all

if TYPE_CHECKING:
    from ..compiler.cache import Cache
    from ..kernels.base import KernelPlan
    from ..spec.attention_spec import Placed
    from ..spec.problem import Problem

NAMES_SHOWN = 100  # of a spec file, where a name is none of them
# Package → what needs it, and the extra that brings it.
_OPTIONAL = {
    "jinja2": ("rendering", "compile"),
    "cuda": ("compiling", "compile"),
    "matplotlib": ("plotting", "bench"),
}


class ErrorsAsMessages(click.Group):
    """A group whose commands end with a message and exit code 1 where attngen refuses."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        prepare()
        try:
            return super().main(*arguments, **options)
        except OSError as error:  # of --help; what commands raise, `invoke` has
            CommandError(str(error)).show()
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # click's own: the reader went away
        except click.UsageError as error:
            said = error.format_message()
            if (shown := fitted(printable_lines(said), sys.stderr)) == said:
                raise
            raise click.UsageError(shown, error.ctx) from error
        except (AttngenError, OSError) as error:
            raise CommandError(str(error)) from error
        except ModuleNotFoundError as error:
            top = (error.name or "").partition(".")[0]
            if top not in _OPTIONAL:
                raise
            what, extra = _OPTIONAL[top]
            advice = f"{what} needs {error.name}: {install_command(extra)}"
            raise CommandError(advice) from error


@click.group(cls=ErrorsAsMessages, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="attngen %(version)s")
@click.option("-v", "--verbose", is_flag=True, help="Log what the stages do.")
def main(verbose: bool) -> None:
    """Compile fused attention kernels from spec files."""
    level = logging.INFO if verbose else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)


one_spec_file = click.argument("spec", metavar="SPEC.toml", type=click.Path(path_type=Path))
one_name = click.option("--name", help="Only the kernel of this name in the file.")


@main.command("list")
@click.argument("specs", metavar="[SPEC.toml]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--coverage", is_flag=True, help="Calls in which every pair of choices meets.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a kernel or refusal.")
def list_(specs: Sequence[Path], coverage: bool, as_json: bool) -> None:
    """Print what a spec may name; with spec files, the kernels that they name.

    Exits with 1 where a spec has no kernel, once all are listed.
    """
    from ..fragments import features
    from ..spec.attention_spec import load_placed
    from ..spec.coverage import list_coverage
    from ..spec.listing import Refused, kernels_of, list_features

    known = features.scan()
    if coverage and specs:
        raise click.UsageError("--coverage is of all features: leave the spec files out")
    if as_json and not specs:
        raise click.UsageError("--json is of spec files: name one")
    if not specs:
        show_all(list_coverage(known) if coverage else list_features(known))
        return
    refused = 0
    for found in kernels_of(load_placed(specs), known):
        refused += isinstance(found, Refused)
        show(json.dumps(found.data) if as_json else found.text)
    if refused:
        advice = "`attngen explain` names the nearest that has"
        raise AttngenError(f"{count_of(refused, 'spec')} without a kernel; {advice}")


@main.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a spec file."
)
def specs(names: Sequence[str], output: Path | None) -> None:
    """Print or write the spec file of models' attention; without a name, list the models."""
    from ..spec import presets

    if not names:
        show_all(f"{name:<16} {presets.summary(name)}" for name in presets.names())
        return
    text = presets.text(names)
    if output is None:
        show(text, nl=False)
        return
    try:
        with creating(output) as file:
            file.write(text.encode())
    except FileExistsError as error:
        advice = "take it away, or name another file"
        raise SpecError(f"{output} is there, and is not replaced: {advice}") from error


@main.command()
@one_spec_file
@one_name
@click.option("--no-compile", is_flag=True, help="Stop after the source.")
def explain(spec: Path, name: str | None, no_compile: bool) -> None:
    """Print each stage's value, or every reason for refusal and the nearest legal spec.

    Exits with 1 where a spec has no kernel, once the others are explained.
    """
    from ..compiler.explain import explain as explain_spec

    refused: list[str] = []
    for each in _select(spec, name):
        try:
            show_all(explain_spec(each.spec, None, compiled=not no_compile, place=each.place))
        except SpecError as error:
            refused += error.reasons
    if refused:
        raise SpecError(refused)


@main.command()
@one_spec_file
@one_name
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, file_okay=False), help="Write files here."
)
def render(spec: Path, name: str | None, output: Path | None) -> None:
    """Print the CUDA source, or write a file a kernel."""
    from ..compiler import batch
    from ..compiler.builder import render_problem
    from ..kernels.fill import is_rendered

    wanted, refused = batch.jobs_of(_select(spec, name), None)
    if refused:
        raise AttngenError([reason for error in refused for reason in error.reasons])
    for job in wanted:
        source = render_problem(job.problem, job.plan)
        if output is None:
            show(source.text, nl=False)
            continue
        path = output / f"{source.kernel.entry}.cu"
        with replacing(path, is_rendered, "source rendered by attngen") as file:
            file.write(source.text.encode())
        show(path)


@main.command()
@click.argument("items", metavar="[ITEM]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object an item.")
def doctor(items: Sequence[str], as_json: bool) -> None:
    """Report what this machine has for building and running kernels, and how to get the rest.

    With items, as `doctor nvrtc cache` or `doctor gpu bundles`, these alone. Exits with 1 where one
    that is named is not in order (--), and always where a check fails (!!): what a machine may lack
    depends on what it is for.
    """
    from ..io.values import to_data
    from . import doctor as doctors

    if unknown := [item for item in items if item not in doctors.CHECKS]:
        known = ", ".join(doctors.CHECKS)
        meant = suggestion(unknown[0], doctors.CHECKS)
        raise click.UsageError(f"unknown items: {', '.join(unknown)}; there are: {known}{meant}")
    failed = False
    for finding in doctors.examine(items):
        show(json.dumps(to_data(finding)) if as_json else doctors.format_finding(finding))
        failed |= finding.status == "problem" or (bool(items) and finding.status == "missing")
    if failed:
        sys.exit(1)


main.add_command(bench)
main.add_command(build)
main.add_command(bundle)
main.add_command(trace)
main.add_command(tune_)


@main.group("cache")
def cache_group() -> None:
    """Look after the cache of compiled kernels."""


@cache_group.command("dir")
def cache_dir() -> None:
    """Print where it is."""
    show(_cache().root)


@cache_group.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a kernel.")
def cache_ls(as_json: bool) -> None:
    """List the kernels, with size, architecture and toolchain."""
    for entry in _cache().entries():
        if as_json:
            created = entry.created if math.isfinite(entry.created) else None
            known = {"created": created, "path": str(entry.path)}
            show(json.dumps({**dataclasses.asdict(entry), **known}))
            continue
        size = f"{entry.bytes / 1000:.0f} kB"
        words = map(printable, (entry.arch, entry.toolchain, entry.label))
        show(f"{entry.digest[:12]}  {size:>8}  {'  '.join(words)}")


@cache_group.command("verify")
def cache_verify() -> None:
    """Check every entry against its digests; exit 1 where one is damaged."""
    if problems := _cache().verify(_source_sha256()):
        found = [f"{problem.path}: {problem.reason}" for problem in problems]
        raise AttngenError([*found, "none of these is used: a kernel asked for compiles anew"])
    show(f"{count_of(len(_cache().entries()), 'kernel')}, all intact")


@cache_group.command("prune")
@click.option("--max-bytes", type=click.IntRange(min=0), help="Keep at most this many bytes.")
@click.option("--max-age-days", type=FiniteFloat(min=0), help="Keep what is younger.")
def cache_prune(max_bytes: int | None, max_age_days: float | None) -> None:
    """Remove the oldest kernels."""
    if max_bytes is None and max_age_days is None:
        raise click.UsageError("say what to keep: --max-bytes, --max-age-days or both")
    seconds = None if max_age_days is None else max_age_days * 86_400
    removed = _cache().prune(max_bytes=max_bytes, max_age_seconds=seconds)
    kilobytes = sum(entry.bytes for entry in removed) / 1000
    show(f"removed {count_of(len(removed), 'kernel')}, {kilobytes:.0f} kB")


@cache_group.command("clear")
def cache_clear() -> None:
    """Remove every kernel; exit 1 where some cannot be."""
    cache = _cache()
    show(f"removed {count_of(cache.clear(), 'kernel')}")
    if left := len(cache.entries()):
        raise AttngenError(f"{count_of(left, 'kernel')} could not be removed from {cache.root}")


def _cache() -> Cache:
    from ..compiler.cache import Cache

    return Cache.default()


def _source_sha256() -> Callable[[Problem, KernelPlan], str] | None:
    """Renders a kernel's source anew, for its digest; None where no template engine is."""
    try:
        from ..compiler.builder import render_problem
        from ..kernels.fill import environment  # noqa: F401  # needs the engine
    except ModuleNotFoundError:
        return None
    return lambda problem, plan: render_problem(problem, plan).sha256


def _select(path: Path, name: str | None) -> list[Placed]:
    from ..spec.attention_spec import load_placed

    found = load_placed([path])
    chosen = [each for each in found if name in (None, each.spec.title, each.spec.name)]
    if not chosen:
        titles = [each.spec.title for each in found]
        meant = suggestion(name or "", titles)
        has = ", ".join(titles[:NAMES_SHOWN])
        if (more := len(titles) - NAMES_SHOWN) > 0:
            has += f" and {more} more"
        raise SpecError(f"{path} has no kernel named {name!r}; it has: {has}{meant}")
    return chosen
