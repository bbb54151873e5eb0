"""Lines of programs: values that depend on the key alone, or on the distance of a pair alone.

A tile of 64 queries and 112 keys has 7,168 pairs, but 112 keys and 175 distances: kernels that keep
lines work out such a value once for each of these, and read it for each pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from .affine import affine_of
from .program import Program
from .program_text import depends_on, programs_in, reached_from

_OF_DISTANCES = frozenset(("sub", "ge", "gt", "le", "lt", "eq", "ne"))  # of two positions
_MOST = 4  # lines of a program, which shared memory has room for
_LEAST_OPERATIONS = 2  # of a line that reads nothing


@dataclass(frozen=True)
class ScoreLines:
    """Values of a program by their names, float32 or int32: of keys, distances, and queries."""

    columns: tuple[str, ...] = ()
    distances: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()

    @property
    def places(self) -> dict[str, str]:
        """The C++ of each value where a kernel keeps it, as a float."""
        kinds = {"columns": self.columns, "distances": self.distances, "rows": self.rows}
        return {value: f"at.{kind}[{n}]" for kind in kinds for n, value in enumerate(kinds[kind])}


def tells_distance(program: Program, value: str) -> bool:
    """Whether a value is the same for all pairs of one distance, of a sequence and head."""
    if not value.startswith("v"):
        return value not in ("i", "j", "s")
    made = program.operation(value)
    if made.name in _OF_DISTANCES and set(made.args) == {"i", "j"}:
        return True
    values = made.args[made.name == "load" :]
    return all(tells_distance(program, each) for each in values)


def lines_of(program: Program, learns: bool = False) -> ScoreLines:
    """The values that a kernel works out once a key or a distance: the last that depend on no more,
    where they take more than to read them.

    learns: whether the kernel wants derivatives by what is read, too; values of these come last.
    """
    found = _find(program, [program.value])
    if learns:
        derivatives = [derivative for _, derivative in program.learned]
        more = _find(program, derivatives)
        columns = dict.fromkeys((*found.columns, *more.columns))
        distances = dict.fromkeys((*found.distances, *more.distances))
        found = ScoreLines(tuple(columns), tuple(distances))
    few = len(found.columns) + len(found.distances) <= _MOST
    return ScoreLines(found.columns, found.distances) if few else ScoreLines()


def turned_lines_of(program: Program) -> ScoreLines:
    """The values that a kernel of keys works out once a query or a distance, for scores and their
    slopes. Distances are those of `lines_of`."""
    rows = _find(program, [program.value, program.slope]).rows
    distances = lines_of(program).distances
    few = len(rows) + len(distances) <= _MOST
    return ScoreLines(distances=distances, rows=rows) if few else ScoreLines()


@cache
def scaled_line(program: Program) -> str:
    """The line that a program adds to scores and reads for nothing else, which kernels keep in the
    units of their scores; empty where there is none."""
    affine, lines = affine_of(program, str), lines_of(program)
    term = "" if affine is None else affine.term
    if term not in (*lines.columns, *lines.distances) or program.operation(term).type != "f":
        return ""
    ends = [program.slope, *(derivative for _, derivative in program.learned)]
    others = [each for end in ends for each in reached_from(program, end)]
    users = [each for each in program.operations if term in each.args]
    return term if term not in others and len(users) == 1 else ""


def _find(program: Program, values: list[str]) -> ScoreLines:
    """Find the lines that values need."""
    columns: dict[str, None] = {}
    distances: dict[str, None] = {}
    rows: dict[str, None] = {}
    kinds = {frozenset("j"): columns, frozenset("i"): rows, frozenset("ij"): distances}
    wanted, seen = [*values], set()
    while wanted:
        value = wanted.pop()
        if not value.startswith("v") or value in seen:
            continue
        seen.add(value)
        made = program.operation(value)
        kept = kinds.get(depends_on(program, [value]) & {"s", "i", "j"})
        if kept is distances and not tells_distance(program, value):
            kept = None
        is_kept = kept is not None and made.type in ("f", "i") and _is_worth(program, value)
        if kept is not None and is_kept:
            kept[value] = None
        if not is_kept or kept is rows:  # that kernels of queries do not keep
            wanted += made.args[made.name == "load" :]
    return ScoreLines(tuple(columns), tuple(distances), tuple(rows))


def _is_worth(program: Program, value: str) -> bool:
    """Whether a value takes more than to read it again."""
    wanted, seen = [value], set()
    while wanted:
        each = wanted.pop()
        if each.startswith("v") and each not in seen:
            seen.add(each)
            wanted += program.operation(each).args
    loads = any(program.operation(each).name == "load" for each in seen)
    return loads or len(seen) >= _LEAST_OPERATIONS


def lines_in(texts: Iterable[str], learns: bool = False) -> tuple[int, int]:
    """How many lines of keys and of distances the programs among texts and digests of fragments
    have, for a kernel that learns, too, or one that does not."""
    found = [lines_of(each, learns) for each in programs_in(texts) if not each.is_mask]
    return sum(len(x.columns) for x in found), sum(len(x.distances) for x in found)


def turned_lines_in(texts: Iterable[str]) -> tuple[int, int]:
    """How many lines of queries and of distances such programs have, for a kernel of keys."""
    found = [turned_lines_of(each) for each in programs_in(texts) if not each.is_mask]
    return sum(len(x.rows) for x in found), sum(len(x.distances) for x in found)


def is_light(program: Program) -> bool:
    """Whether scores take a multiply-add each, of what keys, distances and queries have."""
    found = affine_of(program, str)
    if found is None:
        return False
    kept = lines_of(program).places
    return not any({"i", "j"} <= depends_on(program, [x]) for x in found.needs if x not in kept)


def are_light(texts: Iterable[str]) -> bool:
    """Whether there are programs among texts and digests of fragments, and all are light."""
    found = [each for each in programs_in(texts) if not each.is_mask]
    return bool(found) and all(map(is_light, found))
