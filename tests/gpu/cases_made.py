"""Small calls with masks made before them, and with a scale a token, for compute-sanitizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import attngen
from attngen.frontends.pytorch.callables import bits

from . import gradients, oracle, oracle_fp8
from .test_fp8_token_scales import scaled
from .test_made_masks import HEADS, KEYS, MODS, ROWS


@dataclass(frozen=True)
class MadeMaskCase:
    """A call with its gradients, whose mask is a callable's, by its name among `MODS`. asked:
    whether kernels ask its program, for which there are no bits."""

    name: str
    d: int
    deterministic: bool = False
    asked: bool = False

    def __str__(self) -> str:
        kind = "asked" if self.asked else "made"
        return f"{kind}-{self.name}-d{self.d}{'-deterministic' * self.deterministic}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """Kernels of a mask of bits, which stand beside those of lists."""
        return attngen.AttentionSpec(
            head_dim=self.d, attn_mask=True, deterministic=self.deterministic,
            directions=("fwd", "bwd"),
        )  # fmt: skip

    def check(self, device: torch.device) -> None:
        """Run the call and its gradients. Raises: AssertionError where they are wrong."""
        operands = oracle.operands(2, HEADS, 1, ROWS, KEYS, self.d)
        d_o = oracle.randn(2, ROWS, HEADS, self.d, dtype=operands[0].dtype, seed=5)
        leaves = [x.to(device).requires_grad_() for x in operands]
        more: dict[str, Any] = {"deterministic": self.deterministic, "backend": "cuda"}
        limit = {bits.VARIABLE: "0"} if self.asked else {}
        with mock.patch.dict(os.environ, limit):
            out, aux = attngen.attention(
                *leaves, mask_mod=MODS[self.name](device), return_lse=True, **more
            )
            found = torch.autograd.grad(out, leaves, d_o.to(device))
        mod = {"mask_mod": MODS[self.name](torch.device("cpu"))}
        truth = oracle.truth(*operands, **mod)
        oracle.check(out.detach().cpu(), aux.lse.detach().cpu(), truth)
        gradients.check([x.cpu() for x in found], (*operands, d_o), None, **mod)


@dataclass(frozen=True)
class TokenCase:
    """A call in 8 bits with a scale of each token and head."""

    d: int
    mask: str = "none"

    def __str__(self) -> str:
        return f"token-scales-d{self.d}-{self.mask}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernel that serves a scale a tensor, which is another one's plan."""
        return attngen.AttentionSpec(head_dim=self.d, dtype="e4m3", out_dtype="bf16")

    def check(self, device: torch.device) -> None:
        """Run the call. Raises: AssertionError where its result is wrong."""
        operands, scales = scaled((1, 2, 1), (150, 290), self.d)
        given = {"mask": self.mask, "softmax_scale": 0.01}
        there = {name: x.to(device) for name, x in scales.items()}
        out, aux = attngen.attention(
            *(x.to(device) for x in operands), **given, **there, return_lse=True, backend="cuda"
        )
        truth = oracle_fp8.truth(*operands, **given, **scales)
        oracle_fp8.check(out.cpu(), aux.lse.cpu(), truth)


CASES = (
    MadeMaskCase("documents", 128),
    MadeMaskCase("islands", 64, deterministic=True),
    MadeMaskCase("documents", 80, asked=True),
    MadeMaskCase("islands", 128, deterministic=True, asked=True),
    TokenCase(128, "causal"),
    TokenCase(64),
)
