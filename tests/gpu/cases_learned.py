"""Small calls whose score learns what it captures, for compute-sanitizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import attngen
from attngen.fragments.features import register_program
from attngen.frontends.pytorch.callables import calls as callables

from .test_callables import LEARNED


@dataclass(frozen=True)
class LearnedCase:
    """A score of a callable that learns what it captures, by its name among `LEARNED`."""

    name: str
    d: int
    deterministic: bool = False
    mask: str = "none"

    def __str__(self) -> str:
        order = "-deterministic" * self.deterministic
        return f"learned-{self.name.replace(' ', '-')}-d{self.d}-{self.mask}{order}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        shapes, make = LEARNED[self.name]
        mod = make(*[torch.ones(shape, requires_grad=True) for shape in shapes])
        traced = callables._traced("score_mod", mod, torch.device("cpu"))
        return attngen.AttentionSpec(
            head_dim=self.d,
            mask=self.mask,
            score_mod=register_program(traced.program).name,
            deterministic=self.deterministic,
            directions=("fwd", "bwd"),
        )


CASES = (
    LearnedCase("heads and rows", 64, True),
    LearnedCase("table", 128, mask="causal"),
    LearnedCase("distances", 80),
)
