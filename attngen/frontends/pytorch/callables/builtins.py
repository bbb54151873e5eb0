"""Callables that say what attngen has built in: softcaps, ALiBi, and masks of ranges of keys.

A program is compared as a tree of operations; its numbers and captured tensors become the arguments
of the call that stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....fragments.program import Program
from ....spec.masks import joined
from .program import Traced

Tree = Any  # a word of a program, or an operation's name with its trees
Sizes = tuple[int, int, int, int]  # sequences, query heads, queries, keys
_ALL = "b:1"
_ROUNDING = 1e-6  # relative: of a number's reciprocal


class _Alibi(NamedTuple):
    """A score less the distance of its key, times a captured slope. capture: its number; signed:
    whether the distance is that from a key before the diagonal, and negative behind it."""

    capture: int
    signed: bool


class _Bias(NamedTuple):
    """A captured number for each pair. capture: of which tensor; axes: those of it, of b, h, i, j
    in this order."""

    capture: int
    axes: tuple[str, ...]


class _Window(NamedTuple):
    """Keys up to a distance, the number of that place, less one where it is excluded. before, after
    the query: whether there is one, and whether keys behind the query are hidden."""

    number: int
    excluded: int
    both: bool


@dataclass(frozen=True, eq=False)
class BuiltIn:
    """A program that attngen has built in. arguments: those that stand for it; alibi, bias: where
    these depend on the call; prefix: the number of the captured tensor that has those of
    sequences."""

    arguments: dict[str, Any]
    alibi: _Alibi | None = None
    prefix: int | None = None
    bias: _Bias | None = None

    @property
    def reads(self) -> bool:
        """Whether what stands for it has captured tensors."""
        return any(x is not None for x in (self.alibi, self.prefix, self.bias))


def score_arguments(
    own: BuiltIn,
    captures: Sequence[Tensor],
    given: Mapping[str, Any],
    sizes: Sizes,
) -> dict[str, Any] | None:
    """The arguments of a call that stand for its `score_mod`; None where there are none.

    captures: tensors that this reads; given: what else the call gives; sizes: its sequences, query
    heads, queries and keys, -1 where the shapes of its tensors do not say so.
    """
    if own.bias is not None:
        return _bias_arguments(own.bias, captures, given, sizes)
    found = own.alibi
    if found is None:
        return None if given.get("softcap") else own.arguments
    if not _is_plain(given):
        return None
    asked = given.get("alibi_slopes")
    if asked is not None or given.get("bias_type") == "alibi":
        return None
    if found.signed and given.get("mask") not in ("causal", "padding_causal"):
        return None
    slopes = captures[found.capture]
    fits = slopes.is_floating_point() and slopes.shape in (sizes[1:2], sizes[:2])
    return {"alibi_slopes": slopes} if fits else None


def _bias_arguments(
    bias: _Bias, captures: Sequence[Tensor], given: Mapping[str, Any], sizes: Sizes
) -> dict[str, Any] | None:
    """The captured tensor as `bias`, where that is all that a call adds, of Q's dtype and sizes;
    beside a mask made before only programs leave out what that hides."""
    table, made = captures[bias.capture], given.get("attn_mask")
    beside = given.get("bias") is not None or callable(given.get("mask_mod"))
    beside = beside or given.get("block_mask") is not None
    beside = beside or (made is not None and made.dtype != torch.bool)
    if beside or table.dtype != given["q"].dtype or not _is_plain(given):
        return None
    named = dict(zip("bhij", sizes, strict=True))
    if tuple(table.shape) != tuple([named[axis] for axis in bias.axes]):
        return None
    for place, axis in enumerate("bhij"):
        table = table if axis in bias.axes else table.unsqueeze(place)
    return {"bias": table, "bias_type": "post_scale"}


def mask_arguments(
    own: BuiltIn, captures: Sequence[Tensor], given: Mapping[str, Any], sequences: int
) -> dict[str, Any] | None:
    """The arguments of a call that stand for its `mask_mod`; None where there are none.

    captures: tensors that this reads; given: what else the call gives; sequences: how many it has,
    -1 where the shapes of its tensors do not say so.
    """
    window = given.get("window")
    bounded = window is not None and any(side not in (None, -1) for side in window)
    if given.get("mask") not in (None, "none") or bounded or not _is_plain(given):
        return None
    if own.prefix is None:
        return own.arguments
    prefix = captures[own.prefix]
    fits = prefix.dtype == torch.int32 and prefix.shape == (sequences,)
    return {**own.arguments, "prefix": prefix} if fits else None


def built_in_of(traced: Traced, is_mask: bool) -> BuiltIn | None:
    """Find what attngen has of a program, of a mask or a score; None where it has nothing."""
    tree = _tree_of(traced.program)
    if not is_mask:
        if (cap := _softcap(tree, traced.numbers)) is not None:
            return BuiltIn({"softcap": cap})
        if (bias := _bias(tree)) is not None:
            return BuiltIn({}, bias=bias)
        found = None if traced.program.learned else _alibi(tree)
        return None if found is None else BuiltIn({}, found)
    if tree == _ALL:
        return BuiltIn({})
    if _is_causal(tree):
        return BuiltIn({"mask": "causal"})
    if (window := _window(tree)) is None:
        return _prefix(tree, traced.numbers) or _chunked(tree)
    most = int(traced.numbers[window.number]) - window.excluded
    if most < 0:
        return None
    own: dict[str, Any] = {"window": (most, most if window.both else 0)}
    return BuiltIn(own if window.both else {"mask": "causal", **own})


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether query 0 of a call stands at key 0."""
    return not given.get("bottom_right") and given.get("positions") is None


def _tree_of(program: Program) -> Tree:
    """The tree of a program's value, less casts of integers to floats."""

    def tree(value: str) -> Tree:
        if value.startswith("n") and value[1:].isdigit():
            return "number", int(value[1:])
        if not value.startswith("v"):
            return value
        made = program.operation(value)
        if made.name == "load":
            capture, *indices = made.args
            return "load", int(capture), *map(tree, indices)
        only, *_ = made.args
        if (made.name, made.type) == ("cast", "f"):
            return tree(only)
        return made.name, *map(tree, made.args)

    return tree(program.value)


def _softcap(tree: Tree, numbers: tuple[int | float, ...]) -> float | None:
    """The cap c of c · tanh(s / c)."""
    match tree:
        case ("tanh", "s"):
            return 1.0
        case (
            ("mul", ("number", cap), ("tanh", ("mul", "s", ("number", inverse))))
            | ("mul", ("tanh", ("mul", "s", ("number", inverse))), ("number", cap))
            | ("mul", ("number", cap), ("tanh", ("mul", ("number", inverse), "s")))
            | ("mul", ("tanh", ("mul", ("number", inverse), "s")), ("number", cap))
        ):
            found = float(numbers[cap])
            is_one = abs(found * numbers[inverse] - 1) < _ROUNDING
            return found if found > 0 and is_one else None
    return None


def _bias(tree: Tree) -> _Bias | None:
    """A captured tensor that is added, read where the pair is."""
    match tree:
        case ("add", "s", ("load", capture, *axes)) | ("add", ("load", capture, *axes), "s"):
            in_order = [axis for axis in "bhij" if axis in axes] == axes
            return _Bias(capture, tuple(axes)) if in_order and {*axes} & {"i", "j"} else None
    return None


def _alibi(tree: Tree) -> _Alibi | None:
    match tree:
        case ("add", "s", term) | ("add", term, "s"):
            sign, found = _slope(term)
        case ("sub", "s", term):
            sign, found = _slope(term)
            sign = -sign
        case _:
            return None
    # A distance without a sign is taken off; one with it is negative.
    return found if found is not None and sign == (1 if found.signed else -1) else None


def _slope(tree: Tree) -> tuple[int, _Alibi | None]:
    """The sign of a slope times a distance, of keys less queries where that has a sign itself."""
    match tree:
        case ("neg", term):
            sign, found = _slope(term)
            return -sign, found
        case ("mul", ("load", capture, *axes), term) | ("mul", term, ("load", capture, *axes)):
            sign, signed = _distance(term) if axes in (["h"], ["b", "h"]) else (0, False)
            return sign, _Alibi(capture, signed) if sign else None
    return 0, None


def _distance(tree: Tree) -> tuple[int, bool]:
    """The sign of a distance, 0 where it is none; whether it has one itself."""
    match tree:
        case ("neg", term):
            sign, signed = _distance(term)
            return -sign, signed
        case ("abs", term):
            sign, _ = _distance(term)
            return abs(sign), False
        case ("sub", "j", "i"):
            return 1, True
        case ("sub", "i", "j"):
            return -1, True
    return 0, False


def _is_causal(tree: Tree) -> bool:
    return tree in (("ge", "i", "j"), ("le", "j", "i"))


def _prefix(tree: Tree, numbers: tuple[int | float, ...]) -> BuiltIn | None:
    """A causal mask that shows all keys before one."""
    match tree:
        case ("or", first, other):
            for one, rest in ((first, other), (other, first)):
                match rest:
                    case ("lt", "j", ("number", number)) if _is_causal(one):
                        return BuiltIn({"mask": "prefix", "prefix": int(numbers[number])})
                    case ("lt", "j", ("load", capture, "b")) if _is_causal(one):
                        return BuiltIn({"mask": "prefix"}, prefix=capture)
    return None


def _chunked(tree: Tree) -> BuiltIn | None:
    """Keys of the query's own chunk, those behind it hidden or not."""
    match tree:
        case ("eq", ("fdiv", "i" | "j" as one, word), ("fdiv", "i" | "j" as other, same)):
            kind, _, size = str(word).partition(":")
            if kind == "i" and word == same and one != other and int(size) > 0:
                return BuiltIn({"mask": "chunked", "chunked": int(size)})
        case ("and", first, other):
            for one, rest in ((first, other), (other, first)):
                if _is_causal(one) and (found := _chunked(rest)) is not None:
                    both = joined(["causal", "chunked"])
                    return BuiltIn({**found.arguments, "mask": both})
    return None


def _window(tree: Tree) -> _Window | None:
    match tree:
        case ("and", first, other):
            for one, rest in ((first, other), (other, first)):
                match rest:
                    case (("lt" | "le") as word, ("sub", "i", "j"), ("number", number)):
                        if _is_causal(one):
                            return _Window(number, int(word == "lt"), both=False)
        case (("lt" | "le") as word, ("abs", ("sub", "i", "j") | ("sub", "j", "i")),
              ("number", number)):  # fmt: skip
            return _Window(number, int(word == "lt"), both=True)
    return None
