"""Listing: what a spec may name, and which kernels a spec file names; needs no compiler."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..fragments.features import Features
from ..fragments.program_text import facts_of, programs_in
from ..io.values import to_data
from ..targets.target import names
from . import layouts, resolve
from .attention_spec import (
    DTYPES_8BIT,
    DTYPES_16BIT,
    MAX_HEAD_DIM,
    MAX_TRAINED_HEAD_DIM,
    AttentionSpec,
    Placed,
)
from .fragment_checks import mask_names, score_names
from .head_dims import SPLIT_HEAD_DIMS, WIDE_HEAD_DIMS
from .problem import Problem
from .tables import Place
from .violations import Violation

WIDTH = 80


def list_features(known: Features) -> Iterator[str]:
    """List the values that a spec's fields may have, and the fragments of each axis."""
    yield f"architectures  {' '.join(names())}"
    yield f"dtypes         {' '.join(resolve.DTYPES)}"
    yield f"kv_dtype       as dtype, or {' '.join(DTYPES_8BIT)} beside any"
    yield f"head dims      1 to {MAX_HEAD_DIM} ({' '.join(DTYPES_16BIT)})"
    yield f"head dims      multiples of 16 up to {MAX_HEAD_DIM} ({' '.join(DTYPES_8BIT)})"
    for field, (limit, _) in WIDE_HEAD_DIMS.items():
        whose = " of V" if field == "head_dim_v" else ""
        dtypes = " ".join(DTYPES_16BIT)
        yield f"head dims{whose:<6}1 to {limit}, of a backward {MAX_TRAINED_HEAD_DIM} ({dtypes})"
    for field, (limit, _) in SPLIT_HEAD_DIMS.items():
        whose = " of V" if field == "head_dim_v" else ""
        yield f"head dims{whose:<6}multiples of 8 up to {limit} (decode, pages)"
    yield f"directions     {' '.join(resolve.DIRECTIONS)} (bwd: {' '.join(DTYPES_16BIT)})"
    yield from _wrapped("layouts", (*layouts.FORMATS, *layouts.NAMES))
    yield from _wrapped("masks", mask_names(known))
    if scores := score_names(known):
        yield from _wrapped("score_mod", scores)
    yield f"biases         {' '.join(('none', *resolve.BIASES))}"
    yield from _wrapped("switches", _switches())
    for axis, fragments in known.items():
        if not fragments:
            continue
        yield ""
        yield axis
        for name, fragment in fragments.items():
            yield f"  {name:<15} {fragment.doc}"
            for operand in fragment.operands:
                yield f"  {'':<15} · {operand.name} ({operand.dtype}): {operand.doc}"


def _switches() -> Iterator[str]:
    """The fields of a spec that are true or false, but for those that no kernel serves."""
    for field in dataclasses.fields(AttentionSpec):
        if isinstance(field.default, bool) and field.name not in resolve.SWITCHES:
            yield field.name


def _wrapped(what: str, words: Iterable[str]) -> Iterator[str]:
    """Words behind what they are, on as many lines as they take."""
    for number, line in enumerate(textwrap.wrap(" ".join(words), WIDTH, break_on_hyphens=False)):
        yield f"{what if number == 0 else '':<14} {line}"


@dataclass(frozen=True)
class Listed:
    """A forward or backward that a spec names."""

    spec: AttentionSpec
    arch: str
    problem: Problem

    @property
    def text(self) -> str:
        direction, label = self.problem.direction, self.problem.label
        line = f"{self.spec.title:<24} {self.arch}  {direction}  {label}"
        programs = programs_in(self.problem.fragment_digests)
        return "\n  ".join([line, *(fact for each in programs for fact in facts_of(each))])

    @property
    def data(self) -> dict[str, Any]:
        """The facts of its line, and the problem in full, for JSON."""
        names = {"spec": self.spec.title, "arch": self.arch, "label": self.problem.label}
        return {**names, "problem": to_data(self.problem), "refused": None}


@dataclass(frozen=True)
class Refused:
    """A spec without kernels, the place that it is from, and every reason."""

    spec: AttentionSpec
    place: Place
    violations: tuple[Violation, ...]

    @property
    def text(self) -> str:
        said = "; ".join(each.reason for each in self.violations)
        return f"{self.spec.title:<24} refused: {self.place.at()}: {said}"

    @property
    def data(self) -> dict[str, Any]:
        reasons = [
            {"field": each.field, "place": self.place.at(each.field), "reason": each.reason}
            for each in self.violations
        ]
        return {"spec": self.spec.title, "refused": reasons}


def kernels_of(placed: Iterable[Placed], known: Features) -> Iterator[Listed | Refused]:
    """Each forward or backward that specs name, and each spec that is refused, in their order."""
    for each in placed:
        if violations := resolve.find_violations(each.spec, known):
            yield Refused(each.spec, each.place, tuple(violations))
            continue
        for problem in resolve.resolve(each.spec, known):
            for arch in each.spec.arch:
                yield Listed(each.spec, arch, problem)
