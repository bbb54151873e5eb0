"""Tuned: what `attngen tune` measured, one file a chip, and which plan it speaks for.

Needs no GPU and looks at none: kernels built ahead of time must be those that a call asks for. The
chip is the one that ATTNGEN_CHIP names, else the one that the heuristics of the architecture were
measured on; while that one has no file, the heuristics decide.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..io.files import read_regular, replacing
from ..io.text import printable
from ..io.values import from_json, to_data, to_json
from ..spec.problem import Problem
from ..targets.target import TARGETS
from .base import TiledPlan

SCHEMA = 1
MOST_BYTES = 1 << 26  # of a file
CHIP_VARIABLE = "ATTNGEN_CHIP"
FOLDER = Path(__file__).resolve().parent / "tuned"
# Fields of a plan that follow from the others and the problem.
_DERIVED = ("arch", "family", "smem", "smem_bytes", "threads", "operand_registers", "why")


@dataclass(frozen=True)
class Candidate:
    """A plan that was timed. `settings`: its fields that are chosen, not derived; `ms`: median
    time of a call, by the length of the sequences."""

    settings: dict[str, Any]
    ms: dict[str, float]

    def milliseconds(self, length: int) -> float:
        return self.ms[str(length)]


@dataclass(frozen=True)
class Entry:
    """The candidates of one problem, timed in one run.

    lengths: of queries and keys; batch and heads keep their product with them about the same.
    window: keys on a bounded side, where the problem has a window. sources: digests of what made
    the kernels.
    """

    problem: Problem
    arch: str
    lengths: tuple[int, ...]
    window: int
    date: str
    driver: str | None
    sources: dict[str, str]
    candidates: tuple[Candidate, ...]

    def ranked(self) -> list[tuple[float, Candidate]]:
        """Fastest first, each with its cost: the geometric mean over the lengths of its time over
        the shortest one of that length."""
        shortest = {n: min(c.milliseconds(n) for c in self.candidates) for n in self.lengths}

        def cost(candidate: Candidate) -> float:
            logs = [math.log(candidate.milliseconds(n) / shortest[n]) for n in self.lengths]
            return math.exp(math.fsum(logs) / len(logs))

        costs = [(cost(candidate), candidate) for candidate in self.candidates]
        return sorted(costs, key=lambda pair: pair[0])


@dataclass(frozen=True)
class Tuned:
    """A file: everything that was measured on one kind of chip, `chip` as its driver names it."""

    schema: int
    chip: str
    entries: tuple[Entry, ...]


def slug(chip: str) -> str:
    """The name of a chip's file: `NVIDIA H200` → `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")


def settings(plan: object) -> dict[str, Any]:
    """Choices that tell one candidate of a problem from another, as JSON data."""
    data: dict[str, Any] = to_data(plan)
    return {name: item for name, item in data.items() if name not in _DERIVED}


def file_of(arch: str) -> Path | None:
    """The file of the chip whose plans are taken; None where it has none.

    Raises: PlanError where ATTNGEN_CHIP names a chip without a file.
    """
    named = os.environ.get(CHIP_VARIABLE)
    target = TARGETS.get(arch)
    chip = named or (target and target.chip)
    path = FOLDER / f"{chip}.json"
    if chip == slug(chip or "") and os.path.isfile(path):  # a name, not a path
        return path
    if named:
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.json"))) or "none"
        said = named if len(named) <= 80 else f"{named[:80]}…"
        reason = f"no plans were tuned for it; chips: {known}"
        raise PlanError(f"{CHIP_VARIABLE}={printable(said)}: {reason}")
    return None


def entry_of(problem: Problem, arch: str) -> Entry | None:
    """The measured plan of this problem; None where nothing was measured.

    Raises: PlanError where ATTNGEN_CHIP names a chip without a file, or the file is damaged.
    """
    path = file_of(arch)
    if path is None:
        return None
    found = (each for each in read(path).entries if (each.problem, each.arch) == (problem, arch))
    return next(found, None)


def prefer(plans: Sequence[TiledPlan], entry: Entry | None) -> tuple[TiledPlan, ...]:
    """The plans with the one that measured fastest first; the others keep their order.

    Only a plan of the sequence is preferred: where none has the settings of what was timed, since
    the architecture's choices have changed, the order stays.
    """
    for _, candidate in entry.ranked() if entry else ():
        fastest = [plan for plan in plans if settings(plan) == candidate.settings]
        if fastest:
            return (*fastest, *(plan for plan in plans if plan not in fastest))
    return tuple(plans)


@cache
def read(path: Path) -> Tuned:
    """The contents of a chip's file; read once a process. Raises: PlanError where it is damaged."""
    try:
        found = from_json(Tuned, read_regular(path, MOST_BYTES).decode())
    except (ValueError, OSError) as error:
        raise PlanError(f"{path} holds no tuned plans: {error}") from error
    if found.schema != SCHEMA:
        raise PlanError(f"{path}: schema {found.schema}; this version reads {SCHEMA}")
    if any(not _is_sound(entry) for entry in found.entries):
        raise PlanError(f"{path} holds no tuned plans: a candidate lacks the time of a length")
    return found


def _holds_plans(path: Path) -> bool:
    try:
        return bool(read.__wrapped__(path))
    except PlanError:
        return False


def _is_sound(entry: Entry) -> bool:
    """Whether there are candidates, each with a time for each length."""
    return bool(entry.candidates and entry.lengths) and all(
        0 < candidate.ms.get(str(length), math.nan) < math.inf
        for candidate in entry.candidates
        for length in entry.lengths
    )


def write(path: Path, chip: str, entries: Iterable[Entry]) -> None:
    """Put the entries into the file in place of those of the same problems.

    Raises: PlanError where the file holds something else; OSError.
    """
    new = {(entry.problem, entry.arch): entry for entry in entries}
    old = read(path).entries if path.is_file() else ()
    kept = [entry for entry in old if (entry.problem, entry.arch) not in new]
    ordered = sorted([*kept, *new.values()], key=lambda entry: (entry.arch, entry.problem.label))
    text = to_json(Tuned(SCHEMA, chip, tuple(ordered)), indent=1) + "\n"
    with replacing(path, _holds_plans, "file of tuned plans") as file:
        file.write(text.encode())
    read.cache_clear()
