"""tools/simulated_ranks.py: memory of ranks that are timed."""

from __future__ import annotations

import torch

from attngen.call.context.order import Order
from attngen.call.context.steps import Length
from attngen.call.context.visits import Bands
from attngen.frontends.pytorch.context.messages import Pair
from attngen.frontends.pytorch.context.parts import Rows, Sequences
from attngen.frontends.pytorch.context.plans import both_rounds_of, plans_of
from tools.simulated_ranks import InPlace

RANKS, TOKENS = 4, 8


def test_ranks_that_are_timed_share_regions_and_what_they_receive() -> None:
    order, lengths = Order("dual_chunk", RANKS), (Length.of(RANKS * TOKENS),)
    held: list[Pair] = [(torch.ones(1, TOKENS, 2, 4), torch.ones(1, TOKENS, 2, 3))] * RANKS
    rows = Rows(slice(None), slice(None))
    received, regions = dict[tuple[int, int], Pair](), dict[object, Pair]()
    plans = plans_of(order, lengths, Bands("causal"), False)
    seen = set()
    for rank in range(RANKS):
        both = both_rounds_of(order, lengths, Bands("causal"), rank, TOKENS // 4)
        own = InPlace(
            *(None, rank, plans, (Sequences(rows, rows, 0),), *both),
            held=held,
            received=received,
            regions=regions,
        )
        for rounds in both:
            assert rounds is not None
            for region in rounds.regions:
                k, v = own.room(region, *held[rank])
                assert (k.shape, v.shape) == ((region.tokens, 1, 2, 4), (region.tokens, 1, 2, 3))
                seen.add(k.data_ptr())
        for step in range(1, RANKS):
            own.give((step,), {}, (held[rank][0].transpose(0, 1), held[rank][1]), torch.float32)
    assert len(seen) == len(regions) <= 4  # of 14
    assert len(received) <= 2 * (RANKS - 1)
