"""tools/ring_peer.py: the ring's ranks, as threads of one process, are one causal call."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from attngen.call.context.order import Order
from tools.ring_peer import Ring

RANKS, TOKENS = 3, 24


class Operators:
    """FlashAttention-3's operators, by their formulas, in the dtype that is given."""

    @staticmethod
    def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        visible: Tensor = scores.masked_fill(~seen, -torch.inf) if causal else scores
        return visible

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, num_splits: int
    ) -> tuple[Tensor, Tensor]:
        assert num_splits == 1
        scores = self._scores(q, k, is_causal)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1).float()

    def bwd(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self._scores(q, k, is_causal) - lse.unsqueeze(-1)).exp()
        delta = (d_o * o).sum(-1).transpose(1, 2).unsqueeze(-1)
        of_scores = weights * (torch.einsum("bihd,bjhd->bhij", d_o, v) - delta)
        of_scores = of_scores * q.shape[-1] ** -0.5
        return (
            torch.einsum("bhij,bjhd->bihd", of_scores, k),
            torch.einsum("bhij,bihd->bjhd", of_scores, q),
            torch.einsum("bhij,bihd->bjhd", weights, d_o),
        )


@dataclass(frozen=True)
class Threads(Ring):
    """A rank whose messages are handed over in memory, at the same point of every rank."""

    barrier: Barrier
    boxes: list[Any]

    def pass_on(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        self.boxes[self.rank] = [x.clone() for x in tensors]
        self.barrier.wait(60)
        found = self.boxes[(self.rank - 1) % self.ranks]
        self.barrier.wait(60)
        return found, []


def test_ring_is_one_call() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_o = torch.randn(4, 1, TOKENS, 2, 8, generator=generator, dtype=torch.float64)
    places = torch.tensor([*Order("dual_chunk", RANKS).unshard([TOKENS])])
    whole = [x[:, places.argsort()].unflatten(1, (RANKS, -1)) for x in (q, k, v, d_o)]
    barrier, boxes = Barrier(RANKS), [None] * RANKS

    def of_rank(rank: int) -> list[Tensor]:
        ring = Threads(Operators(), rank, RANKS, barrier, boxes)
        own_q, own_k, own_v, own_d_o = (x[:, rank] for x in whole)
        out, lse = ring.forward(own_q, own_k, own_v)
        return [out, *ring.backward(own_d_o, own_q, own_k, own_v, out, lse.double())]

    with ThreadPoolExecutor(RANKS) as threads:
        found = [*threads.map(of_rank, range(RANKS))]
    out, lse = Operators().fwd(q, k, v, is_causal=True, num_splits=1)
    wanted = [out, *Operators().bwd(d_o, q, k, v, out, lse, is_causal=True)]
    for parts, x in zip(zip(*found, strict=True), wanted, strict=True):
        assert torch.allclose(torch.cat(parts, 1)[:, places], x, atol=1e-5)
