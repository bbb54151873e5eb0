"""Hash what the corpus' kernels are made of, so that a change that moves code proves it only moves.

    python tools/corpus.py            write tests/corpus.json
    python tools/corpus.py --check    compare only; name every kernel that differs, and exit 1

The corpus: the kernels of generated/, of examples/specs, of the presets, of `attngen list
--coverage`, and of 300 sampled problems. A kernel has two hashes: of its source with the headers it
includes, less comments, layout of lines and the digest in the entry's name; and of its launch
description, less that digest. A change that is meant writes the file anew; its diff names the
kernels.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attngen.compiler.builder import render_problem  # noqa: E402
from attngen.errors import AttngenError  # noqa: E402
from attngen.fragments import features  # noqa: E402  # of this checkout
from attngen.io import files  # noqa: E402  # of this checkout
from attngen.io.values import to_json  # noqa: E402
from attngen.kernels.base import KernelPlan  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.spec import coverage, presets  # noqa: E402  # of this checkout
from attngen.spec.attention_spec import load_specs  # noqa: E402
from attngen.spec.problem import Problem  # noqa: E402
from attngen.spec.resolve import resolve  # noqa: E402
from attngen.targets.target import DEFAULT  # noqa: E402
from tools import sweep  # noqa: E402

HASHES = ROOT / "tests" / "corpus.json"
SAMPLED, SEED = 300, 36
OTHERS = ("sm_80", "sm_86")  # of much and of little shared memory
PREFIX = "mma_"  # of their kernels' names
SHORT = 16  # hex digits of a hash: 64 bits
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'#include "(attngen/[^"]+)"')


def without_comments(text: str) -> str:
    """C++ without comments, empty lines, and spaces at the ends of lines."""
    bare = _TOKEN.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    return "\n".join(line for line in map(str.strip, bare.splitlines()) if line)


def flatten(text: str, headers: Mapping[str, bytes]) -> str:
    """The source with each header where it is first included, and comments nowhere, so that headers
    may be renamed and split. headers: contents by the name they are included by."""
    seen: set[str] = set()

    def lines_of(source: str) -> Iterator[str]:
        for line in source.splitlines():
            found = _INCLUDE.fullmatch(line)
            if found is None:
                yield line
            elif (name := found[1]) not in seen:
                seen.add(name)
                yield from lines_of(_bare_header(headers[name]))

    return "\n".join(line for line in lines_of(without_comments(text)) if line != "#pragma once")


def hashes_of(problem: Problem, plan: KernelPlan) -> tuple[str, str]:
    """The name of a kernel without its digest, and the hashes of its source and its launch."""
    source = render_problem(problem, plan)
    entry = source.kernel.entry
    name = entry.rpartition("__")[0]
    text = flatten(source.text.replace(entry, name), files.headers())
    launch = to_json(source.kernel).replace(entry, name)
    return name, f"{_hash(text)} {_hash(launch)}"


def spec_files() -> list[Path]:
    """The examples, curated.toml of generated/ among them, and the presets."""
    folders = (ROOT / "examples" / "specs", presets.FOLDER)
    return [path for folder in folders for path in sorted(folder.glob("*.toml"))]


def problems() -> Iterator[Problem]:
    """Problems of the corpus, some of them twice, always in this order."""
    known = features.scan()
    for spec in itertools.chain.from_iterable(map(load_specs, spec_files())):
        try:
            yield from resolve(spec, known)
        except AttngenError:  # a preset that no kernel serves yet
            continue
    for member in coverage.members(known):
        yield from member.problems(known)
    yield from sweep.sample(SAMPLED, SEED)


def elsewhere() -> Iterator[tuple[str, str]]:
    """Names and hashes of the kernels that chips of other architectures have."""
    for problem, arch in itertools.product(dict.fromkeys(problems()), OTHERS):
        try:
            found = plans(problem, arch)
        except AttngenError:  # of what no family serves there
            continue
        for plan in found:
            if plan.family.startswith(PREFIX):
                yield hashes_of(problem, plan)


def corpus() -> dict[str, list[str]]:
    """Hashes of every kernel, sorted, by its name: plans of one name have a pair each."""
    found: dict[str, set[str]] = {}
    for problem in dict.fromkeys(problems()):
        for plan in plans(problem, DEFAULT.name):
            name, hashes = hashes_of(problem, plan)
            found.setdefault(name, set()).add(hashes)
    for name, hashes in elsewhere():
        found.setdefault(name, set()).add(hashes)
    return {name: sorted(hashes) for name, hashes in sorted(found.items())}


def differences(found: Mapping[str, list[str]], wanted: Mapping[str, list[str]]) -> list[str]:
    """A line for each kernel that is missing, new, or made of something else.

    found: as they are kept; wanted: as they are made now.
    """
    lines = [f"no longer made: {name}" for name in sorted(found.keys() - wanted.keys())]
    lines += [f"new: {name}" for name in sorted(wanted.keys() - found.keys())]
    both = sorted(found.keys() & wanted.keys())
    return lines + [f"differs: {name}" for name in both if found[name] != wanted[name]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it differs")
    parser.add_argument("--output", type=Path, default=HASHES, help="file")
    options = parser.parse_args(arguments)
    made = corpus()
    if not options.check:
        options.output.write_text(json.dumps(made, indent=1) + "\n")
        print(f"{len(made)} names in {options.output}")
        return 0
    lines = differences(json.loads(options.output.read_text()), made)
    if lines:
        print("\n".join([*lines, "if this is meant: `make generated`, and commit what it writes"]))
    return 1 if lines else 0


@functools.cache
def _bare_header(content: bytes) -> str:
    return without_comments(content.decode())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHORT]


if __name__ == "__main__":
    sys.exit(main())
