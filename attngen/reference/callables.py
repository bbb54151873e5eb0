"""`score_mod` and `mask_mod`, mapped over pairs of a query and a key that the masks leave.

A pair that is hidden gets the position, and the score, of one that is not, so that a callable reads
nothing for it that it does not read anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call.table import MaskMod, ScoreMod
from ..errors import SpecError
from .mod_errors import called
from .wording import kind_of, shape_of

Shape = tuple[int, int, int]  # heads, queries, keys
_INT = torch.int32  # of indices, as FlexAttention passes them


def map_mask(
    mod: MaskMod, b: int, shape: Shape, seen: Tensor | None, device: torch.device
) -> Tensor:
    """`mod(b, h, i, j)` of every pair of sequence b, bool [heads, s_q, s_kv]; of hidden ones that
    of another pair. seen: what other masks leave, a broadcast of these; None where that is all."""
    pairs = _pairs_of(shape, seen, device)
    if pairs is None:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    of_pairs = torch.vmap(_checked("mask_mod", mod), in_dims=(None, *pairs.dims(inner=True)))
    of_heads = torch.vmap(of_pairs, in_dims=(None, *pairs.dims(inner=False)))
    sequence = torch.tensor(b, dtype=_INT, device=device)
    mapped = called("mask_mod", mod, of_heads, (sequence, *pairs.indices))
    return mapped.view(shape)


def map_scores(mod: ScoreMod, scores: Tensor, b: int, seen: Tensor | None) -> Tensor:
    """`mod(score, b, h, i, j)` of every score of sequence b, [heads, s_q, s_kv]; hidden ones become
    anything finite. seen: as `map_mask` has it."""
    heads, s_q, s_kv = scores.shape
    pairs = _pairs_of((heads, s_q, s_kv), seen, scores.device)
    if pairs is None:
        return scores
    given = pairs.fill(scores.reshape(heads, s_q * s_kv))
    of_pairs = torch.vmap(_checked("score_mod", mod), in_dims=(0, None, *pairs.dims(inner=True)))
    of_heads = torch.vmap(of_pairs, in_dims=(0, None, *pairs.dims(inner=False)))
    sequence = torch.tensor(b, dtype=_INT, device=scores.device)
    mapped = called("score_mod", mod, of_heads, (given, sequence, *pairs.indices))
    return mapped.reshape(scores.shape).to(scores.dtype)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Positions of pairs: indices h, i and j, of which those of queries and keys are [s_q · s_kv]
    for all heads or, where heads see different keys, [heads, s_q · s_kv] as h then is.

    seen: which of the pairs are not hidden, [1 or heads, s_q · s_kv]; first: the one, by its place,
    that stands for those that are.
    """

    indices: tuple[Tensor, Tensor, Tensor]
    seen: Tensor | None
    first: Tensor | None

    @property
    def of_each_head(self) -> bool:
        return self.indices[1].ndim == 2

    def dims(self, inner: bool) -> tuple[int | None, int | None, int | None]:
        """Axes of the indices that `torch.vmap` goes along: over pairs, or over heads."""
        if self.of_each_head:
            return 0, 0, 0
        return (None, 0, 0) if inner else (0, None, None)

    def fill(self, scores: Tensor) -> Tensor:
        """Scores [heads, s_q · s_kv], hidden ones without a gradient and equal to that of the pair
        which stands for them."""
        if self.seen is None or self.first is None:
            return scores
        held = scores.detach()
        if self.of_each_head:
            return torch.where(self.seen, scores, held.flatten().index_select(0, self.first[None]))
        return torch.where(self.seen, scores, held.index_select(1, self.first[None]))


def _pairs_of(shape: Shape, seen: Tensor | None, device: torch.device) -> _Pairs | None:
    """The pairs of a sequence; None where there are none, or all are known to be hidden."""
    heads, s_q, s_kv = shape
    if heads * s_q * s_kv == 0:
        return None
    every_head = torch.arange(heads, dtype=_INT, device=device)
    place = torch.arange(s_q * s_kv, device=device)
    if seen is None:
        i, j = _divide(place, s_kv)
        return _Pairs((every_head, i, j), None, None)
    if seen.ndim == 2:
        seen = seen[None]
    flat = seen.expand(-1, s_q, s_kv).reshape(seen.shape[0], s_q * s_kv)
    if _is_empty(flat):
        return None
    first = flat.flatten().to(torch.uint8).argmax()
    if len(flat) == 1:
        i, j = _divide(torch.where(flat[0], place, first), s_kv)
        return _Pairs((every_head, i, j), flat, first)
    place = torch.arange(heads * s_q * s_kv, device=device).view(heads, s_q * s_kv)
    h, rest = _divide(torch.where(flat, place, first), s_q * s_kv)
    i, j = _divide(rest, s_kv)
    return _Pairs((h, i, j), flat, first)


def _divide(places: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of places in rows of that width."""
    rows = torch.div(places, width, rounding_mode="floor")
    return rows.to(_INT), (places - rows * width).to(_INT)


def _is_empty(seen: Tensor) -> bool:
    """Whether nothing is seen, as far as anybody can tell: not in a trace or under a transform,
    which do not know the values."""
    if torch.compiler.is_compiling():
        return False
    try:
        return not bool(seen.any())
    except RuntimeError:
        return False


def _checked(name: str, mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which raises SpecError where it returns anything but a tensor of one number, a
    bool of a mask."""

    def checked(*position: Tensor) -> Tensor:
        found: object = mod(*position)
        if not isinstance(found, Tensor) or found.ndim:
            got = shape_of(found) if isinstance(found, Tensor) else kind_of(found)
            raise SpecError(
                f"{name} needs to return one number a position, as a tensor; got {got}."
            )
        is_bool = found.dtype == torch.bool
        if name == "mask_mod" and not is_bool:
            raise SpecError(
                f"mask_mod needs to return a bool a position, True = take part; got "
                f"{shape_of(found)}. Compare, or call .bool(); a score_mod adds to scores."
            )
        if name == "score_mod" and (is_bool or found.is_complex()):
            raise SpecError(
                f"score_mod needs to return a score, a real number; got {shape_of(found)}. Choose "
                "with torch.where(…, score, …), or pass a mask_mod."
            )
        return found

    return checked
