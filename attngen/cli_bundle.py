"""The commands that ship kernels: `attngen bundle …` and `attngen trace`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .errors import AttngenError, BundleError

if TYPE_CHECKING:
    from .bundle import Bundle, Program

bundle_file = click.argument("bundle", metavar="FILE.attn", type=click.Path(path_type=Path))
output_file = click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The bundle to write."
)


@click.group()
def bundle() -> None:
    """Make and look into bundles: the kernels of many specs in one file."""


@bundle.command("build")
@click.argument("specs", metavar="[SPEC.toml]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--from-trace", type=click.Path(path_type=Path), help="What `attngen trace` wrote.")
@click.option("--arch", help="Build for this architecture, not those of the spec files.")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads; default: one a core.")
@output_file
def build(
    specs: Sequence[Path], from_trace: Path | None, arch: str | None, jobs: int | None, output: Path
) -> None:
    """Put every kernel that the spec files name into one bundle; what the cache lacks is compiled.

    Nothing is written where a kernel fails.
    """
    from . import batch, tracing
    from . import bundle as bundles
    from .cache import Cache
    from .spec import load_all

    os.environ.pop("ATTNGEN_DISABLE_JIT", None)  # it forbids compiling in a call, not this
    if not specs and from_trace is None:
        raise click.UsageError("name spec files, or a trace with --from-trace")
    wanted, refused = batch.jobs_of(load_all(specs), arch)
    if from_trace is not None:
        wanted = batch.join([*wanted, *batch.jobs_for(tracing.read(from_trace), str(from_trace))])
    outcomes = []
    for outcome in batch.run(wanted, Cache.default(), jobs):
        outcomes.append(outcome)
        state = "FAILED" if outcome.built is None else "ready"
        click.echo(f"[{len(outcomes)}/{len(wanted)}] {outcome.job.name} {state}", err=True)
    failures = [reason for error in refused for reason in error.reasons]
    failures += [f"{o.job.name}: {o.error}" for o in outcomes if o.built is None]
    if failures:
        raise AttngenError(failures)
    data = bundles.pack(batch.programs_of(outcomes))
    bundles.write(output, data)
    click.echo(_describe(bundles.Bundle(output)))


@bundle.command()
@bundle_file
def verify(bundle: Path) -> None:
    """Check every byte and every kernel; exit 1 where anything is wrong."""
    click.echo(_describe(_open(bundle, whole=True)) + ", intact")


@bundle.command()
@bundle_file
@click.option("--json", "as_json", is_flag=True, help="One JSON object a kernel.")
def ls(bundle: Path, as_json: bool) -> None:
    """List the kernels: what they compute, for which specs, registers and size."""
    for program in _open(bundle).programs():
        for line in _lines(program, as_json):
            click.echo(line)


@bundle.command()
@click.argument("a", metavar="A.attn", type=click.Path(path_type=Path))
@click.argument("b", metavar="B.attn", type=click.Path(path_type=Path))
def diff(a: Path, b: Path) -> None:
    """What only B has (+), only A has (-), and what differs (~); exit 1 where anything does."""
    ours = {program.key: program for program in _open(a).programs()}
    theirs = {program.key: program for program in _open(b).programs()}
    found = []
    for key in sorted({*ours, *theirs}, key=lambda key: (key[1], key[0].label, key[0].direction)):
        what = f"{key[0].label} ({key[0].direction}, {key[1]})"
        if key not in theirs:
            found.append(f"- {what}")
        elif key not in ours:
            found.append(f"+ {what}")
        elif ours[key].identity != theirs[key].identity:
            found.append(f"~ {what}: {_difference(ours[key], theirs[key])}")
    for line in found:
        click.echo(line)
    if found:
        raise SystemExit(1)


@bundle.command()
@click.argument(
    "files", metavar="FILE.attn...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@output_file
def merge(files: Sequence[Path], output: Path) -> None:
    """Put the kernels of several bundles into one, such as those of several build machines."""
    from . import bundle as bundles

    bundles.write(output, bundles.merge([_open(file) for file in files]))
    click.echo(_describe(_open(output)))


@bundle.command()
@bundle_file
@click.option("--name", required=True, help="The package's name, such as acme-attention-kernels.")
@click.option("--version", default="0.1.0", show_default=True, help="The package's version.")
@click.option("-o", "--output", default="dist", type=click.Path(path_type=Path), show_default=True)
def wheel(bundle: Path, name: str, version: str, output: Path) -> None:
    """Wrap a bundle as a package: where pip installs it, calls find its kernels."""
    from .bundle_wheel import make_wheel

    click.echo(make_wheel(_open(bundle, whole=True), name, version, output))


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "-o",
    "--output",
    default="attngen-trace.jsonl",
    show_default=True,
    type=click.Path(path_type=Path),
    help="File that the kernels' problems are added to.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def trace(output: Path, command: Sequence[str]) -> None:
    """Run a program and note which kernels it uses, for `attngen bundle build --from-trace`.

    attngen trace -- python train.py
    """
    from . import tracing

    environment = {**os.environ, tracing.VARIABLE: str(output.absolute())}
    try:
        done = subprocess.run(list(command), env=environment)
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error.strerror}") from error
    used = len(tracing.read(output)) if output.exists() else 0
    click.echo(f"{used} variants noted in {output}", err=True)
    raise SystemExit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def _open(path: Path, whole: bool = False) -> Bundle:
    """The bundle, with every kernel read where `whole`."""
    from .bundle import Bundle

    found = Bundle(path)
    if whole:
        found.programs()
    return found


def _describe(found: Bundle) -> str:
    kernels = sum(len(program.kernels) for program in found.programs())
    size = found.path.stat().st_size / 1000
    return (
        f"{found.path}: {len(found.problems)} variants, {kernels} kernels, {size:.0f} kB, "
        f"sha256 {found.sha256[:12]}"
    )


def _lines(program: Program, as_json: bool) -> Iterator[str]:
    from .values import to_data

    for kernel, cubin in zip(program.kernels, program.cubins, strict=True):
        binary = kernel.binary
        if as_json:
            yield json.dumps(
                {
                    "entry": binary.kernel.entry,
                    "arch": program.arch,
                    "specs": list(program.titles),
                    "problem": to_data(program.problem),
                    "plan": kernel.plan,
                    "digest": kernel.digest,
                    "toolchain": binary.toolchain,
                    "resources": to_data(binary.resources),
                }
            )
        else:
            size = f"{len(cubin) / 1000:.0f} kB"
            names = ", ".join(program.titles)
            yield f"{program.arch}  {size:>7}  {binary.kernel.entry}  {names}"


def _difference(a: Program, b: Program) -> str:
    for name, of_a, of_b in (
        ("toolchain", _toolchains(a), _toolchains(b)),
        ("plan", [k.plan for k in a.kernels], [k.plan for k in b.kernels]),
        ("build digest", [k.digest for k in a.kernels], [k.digest for k in b.kernels]),
    ):
        if of_a != of_b:
            return f"another {name}"
    raise BundleError(f"{a.problem.label}: equal builds with different cubins")


def _toolchains(program: Program) -> list[str]:
    return [kernel.binary.toolchain for kernel in program.kernels]
