"""Checks of calls whose positions several devices share, whatever library computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ...errors import SpecError
from ...spec.masks import masks_of
from .steps import Length

AXES = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}
"""Axes that make each dense layout bshd, and bshd that layout."""


class Over(NamedTuple):
    """Words of messages for those that share positions, all of them and one, and the arguments that
    a call over them takes."""

    all: str
    one: str
    served: tuple[str, ...]


def violations(operands: Sequence[Any], given: Mapping[str, Any], over: Over) -> Iterator[str]:
    """Arguments that calls over several devices do not take. operands: q, k and v, arrays or
    tensors; given: the others by name."""
    for name in sorted({*given} - {*over.served}):
        yield f"{name} is not served over {over.all}; these are: {', '.join(over.served)}"
    layout = given.get("layout", "bshd")
    if layout not in (*AXES, "thd"):
        yield f"layout={layout!r}: over {over.all} it is one of {', '.join((*AXES, 'thd'))}"
    dims = 3 if layout == "thd" else 4
    if any(x.ndim != dims for x in operands):
        yield f"q, k and v in {layout} have {dims} axes; got {[x.ndim for x in operands]}"
    dtype, *others = [x.dtype for x in operands]
    if any(other != dtype for other in others) or dtype.itemsize < 2:
        got = ", ".join(str(each) for each in (dtype, *others))
        yield f"q, k and v need one dtype of 16, 32 or 64 bits; got {got}"
    mask = given.get("mask", "none")
    if not isinstance(mask, str) or {*masks_of(mask).fragments} - {"causal"}:
        yield f"mask={mask!r}: over {over.all} it is a plain one; pass others as attn_mask"
    elif masks_of(mask).arbitrary and "attn_mask" not in given:
        yield f"mask={mask!r} needs attn_mask, bool, of the {over.one}'s queries and all keys"
    if layout == "thd" and ("bias" in given or "attn_mask" in given):
        yield f"bias and attn_mask have no place beside packed tokens over {over.all}"
    if layout == "thd" and "cu_seqlens_q" not in given:
        yield "layout='thd' needs cu_seqlens_q and cu_seqlens_kv of the whole"
    if given.get("softmax", "vanilla") == "learnable" and "sink" not in given:
        yield "softmax='learnable' needs sink, [h]"


def packed_lengths(
    given: Mapping[str, Any],
    tokens: tuple[int, int],
    numbers: Callable[[Any], list[int]],
    holders: str,
) -> tuple[Length, ...]:
    """Lengths of packed sequences, of cu_seqlens_… among a call's arguments. tokens: of queries and
    keys that all hold; numbers: of such an argument, on the host; holders: a word for all of them.

    Raises: SpecError where rooms are not all tokens.
    """
    sides = []
    for side, count in zip(("q", "kv"), tokens, strict=True):
        own = side if f"cu_seqlens_{side}" in given else "q"
        ends, padded = numbers(given[f"cu_seqlens_{own}"]), given.get(f"cu_seqlens_{own}_padded")
        starts = ends if padded is None else numbers(padded)
        rooms, used = ([b - a for a, b in pairwise(x)] for x in (starts, ends))
        if sum(rooms) != count:
            raise SpecError(
                f"cu_seqlens_{side} say {sum(rooms)} tokens, of which all {holders} hold {count}"
            )
        sides.append((rooms, used))
    (rooms_q, used_q), (rooms_kv, used_kv) = sides
    found = zip(rooms_q, rooms_kv, used_q, used_kv, strict=True)
    return tuple([Length(*each) for each in found])
