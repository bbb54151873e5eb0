"""Plans of calls over a group, kept by their lengths: a host takes as long to make some as kernels
run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ....call.context import packed as context_packed
from ....call.context.launches import Form
from ....call.context.order import Order
from ....call.context.packed import Sent, Together, sent_of
from ....call.context.rounds import Rounds, backward_rounds_of, rounds_of
from ....call.context.steps import Length, Part, Step, parts_over_all, steps_of
from ....call.context.visits import Bands
from ....errors import SpecError
from .kept import on_device

PLANS_KEPT, INDICES_KEPT = 256, 32
FULL_ROWS, ROWS = 1 << 15, 128  # of queries and heads, whose tiles fill a GPU twice; of a tile
HIDING = 4096  # queries, of a head, that compute twice as long as NVLink brings a head's keys


@lru_cache(PLANS_KEPT)
def plans_of(
    order: Order, lengths: tuple[Length, ...], bands: Bands, by_position: bool
) -> tuple[tuple[Step, ...], ...]:
    """The steps of every rank, which take a host as long as some kernels run. Raises: SpecError."""
    given = bands._asdict()
    ranks = range(order.ranks)
    return tuple(steps_of(order, r, lengths, by_position=by_position, **given) for r in ranks)


def steps_around(
    order: Order, lengths: tuple[Length, ...], bands: Bands, by_position: bool
) -> tuple[tuple[Step, ...], ...]:
    """The steps of every rank, whose parts have kernels. Raises: SpecError where the order has
    none, or parts compare stripes."""
    plans = plans_of(order, lengths, bands, by_position)
    if any(part.stripe > 1 for plan in plans for step in plan for part in step.parts):
        raise SpecError(
            f"stripe={order.stripe}: under a causal mask parts compare whole stripes, which no "
            "kernel does. Use stripe=1, or comm='a2a'."
        )
    return plans


@lru_cache(PLANS_KEPT)
def both_rounds_of(
    order: Order, lengths: tuple[Length, ...], bands: Bands, rank: int, going: int
) -> tuple[Rounds | None, Rounds | None]:
    """The rounds of a rank's forward and of its backward, whose parts need no positions; None where
    they go by steps."""
    plans = plans_of(order, lengths, bands, False)
    forward = rounds_of(plans, rank, going=going)
    return forward, backward_rounds_of(plans, rank, splits=going > 0)


def queries_going_on(shape: Sequence[int], heads_kv: int, by_kernels: bool) -> int:
    """How many of a rank's queries go on with the keys of each round: as few as fill a GPU, and as
    compute no less time than their keys travel; 0 where half of all are fewer than fill it.

    shape: of q, [b, t, h, d].
    """
    batch, tokens, heads, _ = shape
    half = tokens // 2
    if not by_kernels:
        return half // 2
    if batch * half * heads < FULL_ROWS:
        return 0
    filling = -(-FULL_ROWS // (batch * heads * ROWS)) * ROWS
    return min(half, max(filling, HIDING * heads_kv // heads))


@lru_cache(PLANS_KEPT)
def parts_of(
    order: Order, rank: int, lengths: tuple[Length, ...], bands: Bands
) -> tuple[Part, ...]:
    """The parts of a rank over all keys. Raises: SpecError."""
    return parts_over_all(order, rank, lengths, **bands._asdict())


@on_device(INDICES_KEPT)
def index_of(order: Order, rooms: tuple[int, ...], device: torch.device) -> Tensor:
    """The place of each token among those of all ranks, on a device."""
    with torch.inference_mode(False):
        return torch.tensor(order.unshard(rooms), dtype=torch.int64, device=device)


@lru_cache(PLANS_KEPT)
def launches_around(
    order: Order, rank: int, lengths: tuple[Length, ...], bands: Bands, form: Form
) -> tuple[Together, tuple[tuple[Sent, ...], ...]]:
    """The launches of a rank, and what each rank reads of another's keys at each step."""
    plans = plans_of(order, lengths, bands, form.by_position)
    sent = tuple(
        [tuple([sent_of(step.parts, lengths, order.ranks) for step in plan]) for plan in plans]
    )
    return context_packed.around(order, rank, plans, lengths, form), sent


@lru_cache(PLANS_KEPT)
def launches_over_all(
    order: Order, rank: int, lengths: tuple[Length, ...], bands: Bands, form: Form
) -> Together:
    """The launches of a rank that has the keys of all."""
    parts = parts_of(order, rank, lengths, bands)
    return context_packed.over_all(order, rank, parts, lengths, form)
