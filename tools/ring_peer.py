"""The method of ring-flash-attention on FlashAttention-3's operators: what a ring is timed beside.

Keys and values go around the ring, gradients of keys behind them, by batched sends of NCCL; each
rank holds two of 2n chunks, from both ends, and parts are causal calls of its own tokens, else of
the keys' first half or of the queries' second half. Outputs are merged in float32 by PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Part(NamedTuple):
    """Work of a rank at a step: rows of its queries, rows of the keys at hand, and whether
    the diagonal is theirs."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Ring:
    """A rank of a group of all ranks, and FlashAttention-3's operators."""

    operators: Any
    rank: int
    ranks: int

    def part(self, step: int, tokens: int) -> Part:
        """The part of a step: keys come from the rank that is so many before."""
        half, all_ = tokens // 2, slice(None)
        if step == 0:
            return Part(all_, all_, True)
        if step <= self.rank:
            return Part(all_, slice(half), False)
        return Part(slice(half, None), all_, False)

    def pass_on(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Begin to send tensors to the next rank and to receive those of the one before."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        found = [torch.empty_like(x) for x in tensors]
        ops = []
        for own, room in zip(tensors, found, strict=True):
            ops += [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, room, before)]
        return found, dist.batch_isend_irecv(ops)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output [b, t, h, d_v] and its LSE [b, h, t], float32."""
        total = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32, device=q.device)
        whole = total.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
        held: list[Tensor] = [k, v]
        requests: list[Any] = []
        for step in range(self.ranks):
            coming: list[Tensor] = []
            if step + 1 < self.ranks:
                coming, requests = self.pass_on(held)
            queries, keys, causal = self.part(step, q.shape[1])
            own_k, own_v = (x[:, keys] for x in held)
            out, lse, *_ = self.operators.fwd(
                q[:, queries], own_k, own_v, is_causal=causal, num_splits=1
            )
            own, before = total[:, queries], whole[:, :, queries]
            joined = torch.logaddexp(before, lse)
            own.lerp_(out.float(), (lse - joined).exp().transpose(1, 2).unsqueeze(-1))
            before.copy_(joined)
            for request in requests:
                request.wait()
            held, requests = coming, []
        return total.to(q.dtype), whole

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; those of keys go around behind the keys, in float32."""
        dq = torch.zeros_like(q, dtype=torch.float32)
        held, gone = [k, v], [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
        requests: list[Any] = []
        for step in range(self.ranks):
            coming: list[Tensor] = []
            asked: list[Any] = []
            if step + 1 < self.ranks:
                coming, asked = self.pass_on(held)
            queries, keys, causal = self.part(step, q.shape[1])
            rows = [x[:, queries].contiguous() for x in (d_o, q, o)]
            own_k, own_v = (x[:, keys].contiguous() for x in held)
            of_rows = lse[:, :, queries].contiguous()
            made = self.operators.bwd(
                *(rows[0], rows[1], own_k, own_v, rows[2], of_rows), is_causal=causal
            )
            dq[:, queries].add_(made[0])
            for request in requests:  # the sums of these keys, of the ranks before
                request.wait()
            for total, x in zip(gone, made[1:3], strict=True):
                total[:, keys].add_(x)
            gone, requests = self.pass_on(gone)
            for request in asked:
                request.wait()
            held = coming
        for request in requests:
            request.wait()
        dk, dv = gone
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
