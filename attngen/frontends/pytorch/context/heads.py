"""Exchanges of positions of all heads for all positions of some heads, between ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....call.context.order import Order
from ....errors import SpecError
from .kept import on_device
from .plans import INDICES_KEPT

Move = Callable[[Tensor], Tensor]


class Tokens(NamedTuple):
    """Tokens that ranks of a group hold together: those of ranks from the first on, of the whole
    order, in the order in which rank `outer` of `above` attends to them."""

    order: Order
    first: int
    ranks: int
    above: Order
    outer: int
    rooms: tuple[int, ...]


@on_device(INDICES_KEPT)
def _indices(tokens: Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
    """The index of an exchange and its inverse, on a device. Raises: SpecError."""
    order, rooms = tokens.order, tokens.rooms
    held: list[int] = []
    for place in range(tokens.ranks):
        held += order.shard(tokens.first + place, rooms)
    wanted = tokens.above.shard(tokens.outer, rooms)
    place_of = {token: place for place, token in enumerate(held)}
    if {*wanted} != {*held}:
        raise SpecError(
            "ranks that exchange heads must follow each other in the whole group: rank "
            "outer · inner ranks + inner of group=(inner, outer)"
        )
    with torch.inference_mode(False):
        index = torch.tensor(
            [place_of[token] for token in wanted], dtype=torch.int64, device=device
        )
        back = torch.empty_like(index)
        back[index] = torch.arange(len(index), device=device)
    return index, back


@dataclass(frozen=True, eq=False)
class Exchange:
    """How ranks of a group exchange heads of sequences for positions.

    index: of each token that they hold together, in the order in which they are attended to, its
    place among those of the ranks one behind the other; back: of the inverse order.
    """

    group: Any
    ranks: int
    index: Tensor
    back: Tensor

    @classmethod
    def between(cls, group: Any, tokens: Tokens, device: torch.device) -> Exchange:
        """The exchange of ranks that hold these tokens. Raises: SpecError where they lack some."""
        return cls(group, tokens.ranks, *_indices(tokens, device))

    def to_heads(self, x: Tensor) -> Tensor:
        """All tokens of the rank's share of heads, of the rank's tokens of all, [b, t, h, d]."""
        parts = x.unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous()
        return self._swapped(parts).movedim(0, 1).flatten(1, 2).index_select(1, self.index)

    def to_positions(self, x: Tensor) -> Tensor:
        """The rank's tokens of all heads, of all tokens of its share, [b, t, h, d]."""
        ordered = x.index_select(1, self.back)
        parts = ordered.unflatten(1, (self.ranks, -1)).movedim(1, 0).contiguous()
        return self._swapped(parts).movedim(0, 2).flatten(2, 3)

    def _swapped(self, parts: Tensor) -> Tensor:
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=self.group)
        return found


class Exchanged(torch.autograd.Function):
    """A tensor after one exchange, whose gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, there: Move, back: Move, x: Tensor) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.back(gradient)


def outer_order(order: Order, inner: int) -> Order:
    """The order of groups of so many ranks, each of which holds what its ranks do."""
    stripe = order.stripe * inner if order.name == "striped" else 1
    return Order(order.name, order.ranks // inner, stripe)
