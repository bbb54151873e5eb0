"""Writes what kernels by products of warps keep in local memory to tests/local_accesses.json.

    python tools/local_accesses.py

Of each problem of the covering set and of the example specs, compiled for each chip that has no
larger products: bytes of spills, and loads and stores of local memory in one turn of the loop over
blocks, on the way that has most. Kernels without any are left out; tests hold the others to these
figures, and the figures to limits. Some minutes on one core.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attngen import load_specs  # noqa: E402  # a checkout not installed, too
from attngen.compiler.builder import render_problem  # noqa: E402
from attngen.compiler.compile import compile_source  # noqa: E402
from attngen.errors import PlanError  # noqa: E402
from attngen.fragments import features  # noqa: E402
from attngen.kernels.base import KernelPlan  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.spec import coverage  # noqa: E402
from attngen.spec.problem import Problem  # noqa: E402
from attngen.spec.resolve import resolve  # noqa: E402
from tests.support.sass import opcode_of, turn_of_loop  # noqa: E402

PATH = ROOT / "tests" / "local_accesses.json"
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_120")
Figures = tuple[int, int]


def problems() -> list[Problem]:
    """Problems of the covering set, then those of the example specs, each once."""
    known = features.scan()
    covering = [each for member in coverage.members(known) for each in member.problems(known)]
    paths = sorted((ROOT / "examples" / "specs").glob("*.toml"))
    specs = itertools.chain.from_iterable(map(load_specs, paths))
    return [*dict.fromkeys([*covering, *(each for spec in specs for each in resolve(spec, known))])]


def kernels(problem: Problem, arch: str) -> tuple[KernelPlan, ...]:
    """Plans of the problem's kernels by products of warps. Raises: PlanError."""
    return tuple(each for each in plans(problem, arch) if each.family.startswith("mma_"))


def name_of(problem: Problem, plan: KernelPlan, arch: str) -> str:
    """The name of a kernel in the file."""
    return f"{arch} {plan.family}__{problem.label}"


def is_local(instruction: str) -> tuple[int]:
    """-1 for a load or store of local memory, else 0."""
    return (-int(opcode_of(instruction) in ("LDL", "STL")),)


def figures_of(problem: Problem, plan: KernelPlan, arch: str) -> Figures:
    """Bytes of spills, and accesses of local memory a block. Raises: CompileError."""
    binary, cubin = compile_source(render_problem(problem, plan), problem, arch)
    if not binary.resources.in_local_memory:
        return 0, 0
    accesses = -sum(is_local(each)[0] for each in turn_of_loop(cubin, is_local))
    return binary.resources.spill_bytes, accesses


def jobs() -> Iterator[tuple[Problem, KernelPlan, str]]:
    """Every kernel of every chip."""
    for problem, arch in itertools.product(problems(), CHIPS):
        try:
            yield from ((problem, plan, arch) for plan in kernels(problem, arch))
        except PlanError:
            continue


def main(arguments: Sequence[str] | None = None) -> int:
    logging.getLogger("attngen").setLevel(logging.ERROR)
    wanted = list(jobs())
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda job: figures_of(*job), wanted)
        figures = {name_of(*job): each for job, each in zip(wanted, found, strict=True)}
    named = {name: each for name, each in sorted(figures.items()) if any(each)}
    lines = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in named.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(named)} of {len(figures)} kernels in {PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
