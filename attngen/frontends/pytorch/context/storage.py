"""Recipes of 8 bits in force over a group: operands are stored once, by scales of all its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....call.context.order import Order
from ....call.recipe import CastRule, Narrowed, in_force
from ....errors import SpecError
from ..narrow import SIXTEEN_BITS, narrowed
from .calls import Asked, Ranks
from .parts import Stored


def stored_of(asked: Asked, order: Order, ranks: Ranks) -> Stored | None:
    """A call's q, k and v as the recipe in force stores them; None where none is, or they have no
    16 bits.

    Raises: SpecError where the recipe wants gradients in 8 bits, or needs a layer.
    """
    recipe = in_force.recipe
    if recipe is None or asked.q.dtype not in SIXTEEN_BITS:
        return None

    def shared(
        tensors: Sequence[Tensor],
        used: Sequence[Tensor | None],
        rule: CastRule,
        known: Tensor | None = None,
    ) -> Narrowed:
        """Tensors in 8 bits by the least scales of all ranks."""
        found = narrowed(tensors, used, rule, known)
        if ranks.size == 1:
            return found
        scales = torch.cat([*found.scale])
        dist.all_reduce(scales, dist.ReduceOp.MIN, ranks.group)
        made = narrowed(tensors, used, rule, scales)
        amax = torch.cat([*found.amax])  # of the rank: histories learn those of all elsewhere
        return made._replace(numbers=torch.stack([amax[:, None], *made.numbers[1:]]))

    carriers = asked.q, asked.k, asked.v
    rows = [_used(asked, order, ranks.rank, x) for x in ("q", "kv", "kv")]
    with torch.no_grad():
        made = recipe.quantise([x.detach() for x in carriers], rows, shared)
    if made.by_token:
        raise SpecError(
            "scaling='token' is of calls on one device: over a group parts travel with one scale a "
            "tensor. Take a recipe with scaling='tensor'."
        )
    if made.gradients.form.d_o_dtype and not made.gradients.may_have_16_bits:
        raise SpecError(
            "gradients are not made in 8 bits over a group: take a recipe with backward='16' or "
            "'fp8_or_16'"
        )
    q, k, v = (x for x in made.carriers if x is not None)
    numbers = [x.contiguous().view(torch.uint8) for x in (q, k, v)]
    descales = {name: x for name, x in made.scales.items() if x is not None}
    of_q, of_k, of_v = numbers
    return Stored((of_q, of_k, of_v), q.dtype, asked.q.dtype, descales)


def _used(asked: Asked, order: Order, rank: int, side: str) -> Tensor | None:
    """Which tokens of a rank belong to a sequence, bool [b, t, 1, 1]; None where all do."""
    if asked.uniform:
        return None
    rows = []
    for x in asked.lengths:
        room, length = (x.room_q, x.q) if side == "q" else (x.room_kv, x.kv)
        own = torch.arange(room // order.ranks) < order.used(rank, room, length)
        rows.append(own)
    found = torch.cat(rows)[None] if asked.packed else torch.stack(rows)
    return found[..., None, None].to(asked.q.device)
