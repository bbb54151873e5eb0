"""Tables of a spec file: checked and multiplied out, each with the place that it stands at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from ..io.text import printable, quoted, suggestion
from ..io.toml_text import Lines

PRODUCT_LIMIT = 10_000  # specs of one command: more are a slip, and would fill the memory
REASON_LIMIT = 200  # of one file
WORD_CHARACTERS = 200  # of a key or a value: longer ones are repeated in each spec of a product
LIST_LIMIT = 32  # of the directions and architectures of one spec
TABLES = ("defaults", "kernel")
_TUPLES = ("directions", "arch")


@dataclass(frozen=True)
class Place:
    """Where a table stands.

    origin: its file. label: what it is called there. lines: by key, the table's own as "", where
    they are known. inherited: keys that are those of [defaults].
    """

    origin: str
    label: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    inherited: frozenset[str] = frozenset()

    def at(self, key: str = "") -> str:
        """`specs.toml, line 7`: of a key, else of the table."""
        line = self.lines.get(key) or self.lines.get("")
        return f"{self.origin}, line {line}" if line else self.origin

    def of(self, key: str = "") -> str:
        """`specs.toml, line 7: kernel train`, or `…: defaults` of a key that is from there."""
        whose = "defaults" if key in self.inherited else f"kernel {self.label}"
        return f"{self.at(key)}: {whose}"


@dataclass(frozen=True)
class Table:
    """One `[[kernel]]` with the defaults of its file; its lists are to be multiplied out.

    refused: keys of a spec that were taken out of `fields`, for reasons already given.
    """

    place: Place
    fields: dict[str, Any]
    refused: frozenset[str] = frozenset()

    @property
    def specs(self) -> int:
        """The number of specs that its lists make."""
        return math.prod(map(len, _axes(self.fields).values()))

    def products(self) -> Iterator[dict[str, Any]]:
        """The fields of each spec; a product's name tells them apart."""
        axes = _axes(self.fields)
        fixed = {k: v for k, v in self.fields.items() if k not in axes}
        for choice in itertools.product(*axes.values()):
            chosen = dict(zip(axes, choice, strict=True))
            fields = {**fixed, **chosen}
            if axes and isinstance(fields.get("name"), str):
                words = itertools.starmap(_say, chosen.items())
                fields["name"] = "-".join([fields["name"], *words])
            yield fields


def tables_of(
    data: Mapping[str, Any], origin: str, lines: Lines, known: Iterable[str]
) -> tuple[list[Table], list[str]]:
    """The tables of a parsed file, without the keys that no spec has, and what is wrong with them.

    known: the fields of a spec. Raises: SpecError where what should be tables is none.
    """
    defaults, kernels = data.get("defaults", {}), data.get("kernel", [])
    before = lines.of("")
    if not isinstance(defaults, dict):
        raise SpecError(f"{Place(origin, '', before).at('defaults')}: defaults must be a table, "
                        "[defaults]")  # fmt: skip
    if not isinstance(kernels, list) or not all(isinstance(each, dict) for each in kernels):
        where = Place(origin, "", {**before, **lines.of("kernel")}).at("kernel")
        raise SpecError(f"{where}: kernels must be tables, [[kernel]]")
    unknown = itertools.islice((key for key in data if key not in TABLES), REASON_LIMIT)
    reasons = [
        f"{Place(origin, '', {**before, **lines.of(key)}).at(key)}: unknown table {quoted(key)}"
        f"{suggestion(key, TABLES)}; allowed: [defaults], [[kernel]]"
        for key in unknown
    ]
    if not kernels:
        reasons.append(f"{origin}: no [[kernel]] table")
    fields, found = [*known], []
    written = dict.fromkeys(defaults, before.get("defaults", 0)) | lines.of("defaults")
    inherited = {key: line for key, line in written.items() if key}
    for number, own in enumerate(kernels, 1):
        name = own.get("name")
        label = name if isinstance(name, str) and len(name) <= WORD_CHARACTERS else str(number)
        its = lines.of("kernel", number) or {"": before.get("kernel", 0)}
        places = {**inherited, **dict.fromkeys(own, 0), **its}
        place = Place(origin, printable(label), places, frozenset(defaults.keys() - own.keys()))
        found.append(Table(place, {**defaults, **own}))
    checked = []
    for table in found:
        mistakes = _find_mistakes(table, fields)
        reasons += mistakes.values()
        if len(reasons) >= REASON_LIMIT:
            raise SpecError(at_most(reasons, origin))
        sound = {key: value for key, value in table.fields.items() if key not in mistakes}
        checked.append(Table(table.place, sound, frozenset(mistakes)))
    return checked, reasons


def count_specs(tables: Iterable[Table], origin: str, limit: int) -> list[str]:
    """Reasons why the tables make too many specs, before any is made."""
    counts = [(table.place, table.specs) for table in tables]
    if large := [f"{place.of()}: its lists make {n} specs; at most {PRODUCT_LIMIT}"
                 for place, n in counts if n > PRODUCT_LIMIT]:  # fmt: skip
        return large
    if (total := sum(n for _, n in counts)) > limit:
        left = "" if limit == PRODUCT_LIMIT else f", and {limit} are left beside other files"
        return [f"{origin}: its tables make {total} specs; at most {PRODUCT_LIMIT}{left}"]
    return []


def at_most(reasons: Iterable[str], origin: str) -> list[str]:
    """The reasons, each once, but no more than anybody reads."""
    distinct = [*dict.fromkeys(reasons)]
    if len(distinct) < REASON_LIMIT:
        return distinct
    return [*distinct[:REASON_LIMIT], f"{origin}: what else is wrong is left out"]


def _find_mistakes(table: Table, known: list[str]) -> dict[str, str]:
    """Key → why it cannot be a spec's, or has more in it than a spec can."""
    reasons: dict[str, str] = {}
    place = table.place
    for key, value in table.fields.items():
        if len(reasons) == REASON_LIMIT:
            break
        if key not in known:
            others = f"; known: {', '.join(known)}"
            reasons[key] = f"unknown key {quoted(key)}{suggestion(key, known) or others}"
        elif value == []:
            reasons[key] = f"{key} is an empty list"
        elif key in _TUPLES and isinstance(value, list) and len(value) > LIST_LIMIT:
            reasons[key] = f"{key} has more than {LIST_LIMIT} values"
        elif any(isinstance(x, str) and len(x) > WORD_CHARACTERS for x in _values(value)):
            reasons[key] = f"{key} has more than {WORD_CHARACTERS} characters"
    return {key: f"{place.of(key)}: {reason}" for key, reason in reasons.items()}


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _say(field: str, value: Any) -> str:
    """A value in a product's name: a switch by its field's."""
    if isinstance(value, bool):
        return field if value else f"no_{field}"
    return value if isinstance(value, str) else quoted(value)


def _axes(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The fields that have a list where a spec has one value."""
    return {k: v for k, v in table.items() if isinstance(v, list) and k not in _TUPLES}
