"""The commands that ship kernels: `attngen bundle …` and `attngen trace`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import BundleError, CacheError
from ..io.files import can_write_into, require_own
from ..io.text import printable
from .build import Request, build_all, count_of, takes_request
from .output import CommandError, show

if TYPE_CHECKING:
    from ..compiler.cache import Cache
    from ..ship.bundle import Bundle, BundledKernel, Program

log = logging.getLogger("attngen")
bundle_file = click.argument("bundle", metavar="FILE.attn", type=click.Path(path_type=Path))
output_file = click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The bundle to write.",
)


@click.group()
def bundle() -> None:
    """Make and look into bundles: the kernels of many specs in one file."""


@bundle.command("build")
@takes_request
@output_file
def build(request: Request, output: Path) -> None:
    """Put every kernel that the spec files name into one bundle; what the cache lacks is compiled.

    Nothing is written where a kernel fails; those that did not are in the cache for the next try.
    """
    from ..compiler import batch
    from ..ship import writer as bundle_write

    _check_output(output)
    with _cache() as cache:
        outcomes = build_all(request, cache)
        if request.dry_run:
            return
        programs = batch.programs_of(outcomes)
        bundle_write.write(output, programs, batch.cubins_of(outcomes, cache))
    _tell(output, request.as_json)


@bundle.command()
@bundle_file
@click.option(
    "--require",
    metavar="SPEC.toml",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Refuse the bundle where it lacks a kernel of this file; may be repeated.",
)
def verify(bundle: Path, require: Sequence[Path]) -> None:
    """Check every byte and every kernel; exit 1 where anything is wrong."""
    found = _open(bundle)
    found.verify()
    if require:
        from ..ship.lookup import check_complete
        from ..spec.attention_spec import load_placed

        specs = [each.spec for each in load_placed(require)]
        check_complete([found], specs, shlex.join(map(str, require)))
    show(_describe(found) + ", intact")


@bundle.command()
@bundle_file
@click.option("--json", "as_json", is_flag=True, help="One JSON object a kernel.")
def ls(bundle: Path, as_json: bool) -> None:
    """List the kernels: what they compute, for which specs, registers and size in the file."""
    found = _open(bundle)
    for program in found.programs():
        for kernel in program.kernels:
            show(_kernel_line(found, program, kernel, as_json))


@bundle.command()
@click.argument("a", metavar="A.attn", type=click.Path(path_type=Path))
@click.argument("b", metavar="B.attn", type=click.Path(path_type=Path))
def diff(a: Path, b: Path) -> None:
    """Compare two bundles: only B has (+), only A has (-), both have but differ (~).

    Exit code 0: nothing differs; 1: something does; 2: one of them is no bundle.
    """
    try:
        ours = {program.key: program for program in _open(a).programs()}
        theirs = {program.key: program for program in _open(b).programs()}
    except BundleError as error:
        show(f"Error: {error}", err=True)
        raise SystemExit(2) from error
    found = []
    for key in sorted({*ours, *theirs}, key=lambda key: (key[1], key[0].label, key[0].direction)):
        if key not in theirs:
            found.append(f"- {ours[key].name}")
        elif key not in ours:
            found.append(f"+ {theirs[key].name}")
        elif ours[key].binaries != theirs[key].binaries:
            found.append(f"~ {ours[key].name}: {_difference(ours[key], theirs[key])}")
    for line in found:
        show(line)
    raise SystemExit(1 if found else 0)


@bundle.command()
@click.argument(
    "files", metavar="FILE.attn...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@output_file
def merge(files: Sequence[Path], output: Path) -> None:
    """Put the kernels of several bundles into one, such as those of several build machines."""
    from ..ship.writer import merge as merge_bundles

    _check_output(output)
    merge_bundles(output, [_open(file) for file in files])
    _tell(output, as_json=False)


@bundle.command()
@bundle_file
@click.option("--name", required=True, help="The package's name, such as acme-attention-kernels.")
@click.option("--version", default="0.1.0", show_default=True, help="The package's version.")
@click.option(
    "-o",
    "--output",
    default="dist",
    type=click.Path(path_type=Path, file_okay=False),
    show_default=True,
    help="Directory to write the wheel into.",
)
def wheel(bundle: Path, name: str, version: str, output: Path) -> None:
    """Wrap a bundle as a package: where pip installs it, calls find its kernels."""
    from ..ship.wheel import make_wheel

    found = _open(bundle)
    found.verify()
    show(make_wheel(found, name, version, output))


@click.command(context_settings={"allow_interspersed_args": False})
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
    from ..runtime import tracing

    environment = {**os.environ, tracing.VARIABLE: str(output.absolute())}
    # Where no trace can be, or something else is, shows before anything runs.
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.exists():
        tracing.read(output)
    try:
        done = subprocess.run(list(command), env=environment)
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from error
    output.touch()  # what launched nothing has a trace, too
    used = len(tracing.read(output))
    why = "" if used else ": no kernel of attngen was launched"
    show(f"{count_of(used, 'variant')} noted in {output}{why}", err=True)
    raise SystemExit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


def _check_output(path: Path) -> None:
    """Raises: BundleError where a bundle cannot be put there; OSError where it would replace
    another file."""
    from ..ship.bundle import is_bundle

    if not can_write_into(path.parent):
        raise BundleError(f"{path} cannot be written: no file can be made in {path.parent}")
    require_own(path, is_bundle, "bundle")


@contextlib.contextmanager
def _cache() -> Iterator[Cache]:
    """The cache, or one for this command alone where its user has no home."""
    from ..compiler.cache import Cache

    try:
        found = Cache.default()
    except CacheError as error:
        log.warning("%s; nothing but the bundle is kept", error)
        with tempfile.TemporaryDirectory(prefix="attngen-") as folder:
            yield Cache(folder)
    else:
        yield found


def _open(path: Path) -> Bundle:
    from ..ship.bundle import Bundle

    return Bundle(path)


def _tell(path: Path, as_json: bool) -> None:
    """Print the contents of a bundle that was just written."""
    found = _open(path)
    if as_json:
        kernels = sum(len(program.kernels) for program in found.programs())
        facts = {"variants": len(found.problems), "kernels": kernels}
        sizes = {"bytes": found.bytes, "sha256": found.sha256}
        show(json.dumps({"bundle": str(path), **facts, **sizes}))
    else:
        show(_describe(found))


def _describe(found: Bundle) -> str:
    kernels = sum(len(program.kernels) for program in found.programs())
    return (
        f"{printable(str(found.path))}: {count_of(len(found.problems), 'variant')}, "
        f"{count_of(kernels, 'kernel')}, {found.bytes / 1000:.0f} kB, sha256 {found.sha256[:12]}"
    )


def _kernel_line(found: Bundle, program: Program, kernel: BundledKernel, as_json: bool) -> str:
    from ..io.values import to_data

    binary = kernel.binary
    stored = found.stored_bytes(binary)
    if as_json:
        return json.dumps(
            {
                "entry": binary.kernel.entry,
                "arch": program.arch,
                "specs": program.titles,
                "problem": to_data(program.problem),
                "plan": kernel.plan,
                "digest": kernel.digest,
                "toolchain": binary.toolchain,
                "resources": to_data(binary.resources),
                "stored_bytes": stored,
            }
        )
    size = f"{stored / 1000:.0f} kB"
    registers = f"{binary.resources.registers} registers"
    names = printable(f"{binary.kernel.entry}  {', '.join(program.titles)}")
    return f"{printable(program.arch)}  {size:>7}  {registers:>13}  {names}"


def _difference(a: Program, b: Program) -> str:
    """The first of what may make the kernels of two equal problems differ."""
    for name, of_a, of_b in (
        ("toolchain", [x.toolchain for x in a.binaries], [x.toolchain for x in b.binaries]),
        ("plan", [k.plan for k in a.kernels], [k.plan for k in b.kernels]),
        ("source", [x.source_sha256 for x in a.binaries], [x.source_sha256 for x in b.binaries]),
        ("launch", [x.kernel for x in a.binaries], [x.kernel for x in b.binaries]),
    ):
        if of_a != of_b:
            return f"another {name}"
    return "another cubin of the same source"
