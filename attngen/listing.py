"""Listing: what a spec may name, and which kernels a spec file names; needs no compiler."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator

from . import layouts, resolve
from .errors import SpecError
from .features import Features
from .spec import DTYPES_8BIT, DTYPES_16BIT, MAX_HEAD_DIM, AttentionSpec

WIDTH = 80


def list_features(known: Features) -> Iterator[str]:
    """What a spec may name: the values of its fields, and each axis's fragments."""
    yield f"architectures  {' '.join(resolve.ARCHES)}"
    yield f"dtypes         {' '.join(resolve.DTYPES)}"
    yield f"kv_dtype       as dtype, or {' '.join(DTYPES_8BIT)} beside any"
    yield f"head dims      1 to {MAX_HEAD_DIM} ({' '.join(DTYPES_16BIT)})"
    yield f"head dims      multiples of 16 up to {MAX_HEAD_DIM} ({' '.join(DTYPES_8BIT)})"
    for field, (limit, _) in resolve.SPLIT_HEAD_DIMS.items():
        whose = " of V" if field == "head_dim_v" else ""
        yield f"head dims{whose:<6}multiples of 8 up to {limit} (decode)"
    yield f"head dims      multiples of 8 up to {MAX_HEAD_DIM} (pages without decode)"
    yield f"directions     {' '.join(resolve.DIRECTIONS)} (bwd: {' '.join(DTYPES_16BIT)})"
    yield from _wrapped("layouts", (*layouts.FORMATS, *layouts.NAMES))
    yield from _wrapped("masks", resolve.mask_names(known))
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


def list_kernels(specs: Iterable[AttentionSpec], known: Features) -> Iterator[str]:
    """One line a forward or backward that the specs name: title, architecture, what it computes."""
    for spec in specs:
        try:
            problems = resolve.resolve(spec, known)
        except SpecError as error:
            *reasons, _ = error.reasons  # the last one is the nearest legal spec
            said = "; ".join(reason.removeprefix(f"{spec.title}: ") for reason in reasons)
            yield f"{spec.title:<24} refused: {said}"
            continue
        for problem in problems:
            for arch in spec.arch:
                yield f"{spec.title:<24} {arch}  {problem.direction}  {problem.label}"
