"""Listing: what a spec may name, and which kernels a spec file names; needs no compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from . import resolve
from .errors import SpecError
from .features import Features
from .spec import DTYPES_8BIT, DTYPES_16BIT, MAX_HEAD_DIM, AttentionSpec


def list_features(known: Features) -> Iterator[str]:
    """What a spec may name: architectures, dtypes, directions, and each axis's fragments."""
    yield f"architectures  {' '.join(resolve.ARCHES)}"
    yield f"dtypes         {' '.join(resolve.DTYPES)}"
    yield f"kv_dtype       as dtype, or {' '.join(DTYPES_8BIT)} beside any"
    yield f"head dims      1 to {MAX_HEAD_DIM} ({' '.join(DTYPES_16BIT)})"
    yield f"head dims      multiples of 16 up to {MAX_HEAD_DIM} ({' '.join(DTYPES_8BIT)})"
    yield f"directions     {' '.join(resolve.DIRECTIONS)} (bwd: {' '.join(DTYPES_16BIT)})"
    yield f"switches       dropout attn_mask ({' '.join(DTYPES_16BIT)})"
    for axis, fragments in known.items():
        if not fragments:
            continue
        yield ""
        yield axis
        for name, fragment in fragments.items():
            yield f"  {name:<12} {fragment.doc}"
            for operand in fragment.operands:
                yield f"  {'':<12} · {operand.name} ({operand.dtype}): {operand.doc}"


def list_kernels(specs: Iterable[AttentionSpec], known: Features) -> Iterator[str]:
    """One line a forward or backward that the specs name: title, architecture, what it computes."""
    for spec in specs:
        try:
            problems = resolve.resolve(spec, known)
        except SpecError as error:
            yield f"{spec.title:<24} refused: {error.reasons[0]}"
            continue
        for problem in problems:
            for arch in spec.arch:
                yield f"{spec.title:<24} {arch}  {problem.direction}  {problem.label}"
