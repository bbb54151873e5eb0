"""Packed sequences that stand where places say, for compute-sanitizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attngen
import attngen.frontends.pytorch.forward_onto  # noqa: F401  # defines the operation

from . import gradients, oracle


@dataclass(frozen=True)
class PlacedCase:
    """Packed sequences with gaps, each on a diagonal of its own, of which one sees nothing in the
    first of two parts: gradients of all keys at once, and outputs that join."""

    d: int
    dropout_p: float = 0.0
    sizes: tuple[tuple[int, int, int], ...] = ((40, 60, 9), (60, 30, -12), (20, 50, 30))
    cut: int = 25

    def __str__(self) -> str:
        return f"placed-d{self.d}-p{self.dropout_p}-cut{self.cut}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels of its gradients."""
        return attngen.AttentionSpec(
            head_dim=self.d,
            layout="thd",
            mask="causal",
            positions=True,
            dropout=self.dropout_p > 0,
            directions=("fwd", "bwd"),
        )

    def arguments(self, begin: int, end: int) -> dict[str, Tensor]:
        """Lengths and places of keys from one of each sequence to before another."""
        keys = [max(0, min(end, x) - begin) for _, x, _ in self.sizes]
        stands = [(n, begin, delta - begin, n) for n, (*_, delta) in enumerate(self.sizes)]
        queries = [rows for rows, *_ in self.sizes]
        ends_q, ends_kv = (torch.tensor([0, *x]).cumsum(0) for x in (queries, keys))
        starts = torch.tensor([(70 * n, 64 * n + min(begin, 60)) for n in range(4)])
        found = {"cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv, "places": torch.tensor(stands)}
        found |= {"cu_seqlens_q_padded": starts[:, 0], "cu_seqlens_kv_padded": starts[:, 1]}
        return {name: x.int().contiguous() for name, x in found.items()}

    def check(self, device: torch.device) -> None:
        """Compare both with the definition, on the CPU."""
        q, k, v = (x[0] for x in oracle.operands(1, 4, 2, 210, 192, self.d, self.d, torch.bfloat16))
        d_o = oracle.randn(*q.shape, dtype=torch.bfloat16, seed=9)
        given: dict[str, Any] = {"layout": "thd", "mask": "causal"}
        if self.dropout_p:
            given |= {"dropout_p": self.dropout_p, "rng_state": torch.tensor([5, 6])}
        whole = {**given, **self.arguments(0, 1 << 20)}
        there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in whole.items()}
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        result, aux = attngen.attention(*leaves, **there, return_lse=True, backend="cuda")
        found = [x.cpu() for x in torch.autograd.grad(result, leaves, d_o.to(device))]
        truth = oracle.truth(q, k, v, **whole)
        oracle.check(result.detach().cpu(), aux.lse.detach().cpu(), truth, "thd")
        gradients.check(found, [q, k, v, d_o], None, **whole)
        out = torch.zeros(q.shape, dtype=torch.float32, device=device)
        lse = out.new_full((q.shape[1], len(q)), -torch.inf)
        rounded, marks = torch.zeros_like(leaves[0]), torch.tensor([1, 1, 1]).int().to(device)
        for begin, end in ((0, self.cut), (self.cut, 1 << 20)):
            part = {n: x.to(device) for n, x in self.arguments(begin, end).items()}
            part["fragment_0"] = part.pop("places")
            own = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
            state = out, lse, rounded, marks + 1 * (begin > 0), True, True
            operands = (x.detach() for x in leaves)
            words = {"positions": "0 0 0 0 0", "out_dtype": "float32"}
            torch.ops.attngen.forward_onto(*operands, *state, **own, **part, **words)
        oracle.check(rounded.cpu(), lse.cpu(), truth, "thd")


CASES = [PlacedCase(64), PlacedCase(128, 0.2)]
