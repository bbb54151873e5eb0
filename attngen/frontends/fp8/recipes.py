"""Recipes: how scales follow from the largest magnitudes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from ...call.fp8_scales import BACKWARDS, MIXED, delayed_violations
from ...call.recipe import CastRule, GradientForm, StepRule
from ...call.tensors import name_of
from ...errors import SpecError
from ...reference.fp8_scales import current_scale, scale_of
from ...spec.scaling import SCALINGS

_SPARE = {torch.float8_e5m2: 4, torch.float8_e4m3fn: 1}  # binades above the dS of the step before


class Format(Enum):
    """Dtypes of stored tensors: those of the forward, and those of gradients."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    @property
    def forward(self) -> torch.dtype:
        """The dtype of q, k, v and the output."""
        dtype, _ = self.value
        return dtype

    @property
    def backward(self) -> torch.dtype:
        """The dtype of the output's gradient."""
        _, dtype = self.value
        return dtype


@dataclass(frozen=True)
class Float8CurrentScaling:
    """Scales of each tensor's own largest magnitude, found before it is stored.

    use_power_2_scales: the next power of two below, so that stored numbers widen to 16 bits without
    a rounding. amax_epsilon: the least magnitude that is taken. scaling: tensor, or token, a scale
    a token and head, by which under a causal mask no later token changes a bit of an earlier
    output; gradients have 16 bits then. backward: in which bits gradients are made, 16, fp8,
    fp8_or_16, which has 16 where kernels have none of 8, or mixed, with S and dP of 8 bits and dQ,
    dK and dV of 16. In 8 bits dS, which is never whole, has a scale by the step before in an
    `attngen.fp8.Attention`, else by a bound.
    fp8_dpa: whether attention runs in FP8 at all; fp8_mha: whether `attngen.te` may return FP8.

    Raises: SpecError with every violation at once.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = True
    amax_epsilon: float = 0.0
    backward: str = "16"
    fp8_dpa: bool = True
    fp8_mha: bool = False
    scaling: str = "tensor"

    def __post_init__(self) -> None:
        reasons = _violations(self)
        if self.scaling not in SCALINGS:
            reasons.append(f"scaling needs {', '.join(SCALINGS)}; got {self.scaling!r}")
        if self.by_token and self.backward in ("fp8", MIXED):
            reasons.append(
                "scaling='token' has gradients in 16 bits: sums over tokens, which those in 8 are, "
                f"leave no token's scale behind them; got backward={self.backward!r}. Pass '16'."
            )
        if not 0 <= self.amax_epsilon < float("inf"):
            reasons.append(f"amax_epsilon needs a number >= 0; got {self.amax_epsilon!r}")
        if reasons:
            raise SpecError(reasons)

    def scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales of tensors with these largest magnitudes, float32; 1 where there is none."""
        return current_scale(amax, dtype, 0, self.use_power_2_scales, self.amax_epsilon)

    def cast_rule(self, dtype: torch.dtype) -> CastRule:
        """How scales of tensors that are stored in that dtype follow."""
        given = self.amax_epsilon, 0, self.use_power_2_scales, self.by_token
        return CastRule(name_of(dtype), *given)

    @property
    def by_token(self) -> bool:
        """Whether each token and head has a scale."""
        return self.scaling == "token"

    @property
    def gradient_form(self) -> GradientForm:
        """How a backward stores dO where no history says it."""
        if self.backward == "16" or self.by_token:
            return GradientForm()
        dtype = name_of(self.fp8_format.backward)
        mixed = self.backward == MIXED
        return GradientForm(dtype, 0, self.use_power_2_scales, self.amax_epsilon, mixed)

    def step_rule(self, dtype: torch.dtype) -> StepRule:
        """How scales of dO and dS follow where a step ends: dO's is its own."""
        return StepRule(name_of(dtype), 1, False, _SPARE[dtype], True)


@dataclass(frozen=True)
class DelayedScaling:
    """Scales of the largest magnitudes in the steps before, which a layer keeps.

    A tensor's first step, of which there is no history, takes its own largest magnitude. margin:
    binades left free above it. amax_history_len: steps that are remembered. amax_compute_algo: the
    largest of these (max), that of the step before (most_recent), or a function of the history,
    float32 [amax_history_len, n], that returns [n]. reduce_amax: whether processes of a group share
    their maxima. backward: in which bits gradients are made, 16, fp8, fp8_or_16, which has 16 where
    kernels have none of 8, or mixed, with S and dP of 8 bits and dQ, dK and dV of 16. fp8_dpa:
    whether attention runs in FP8 at all; fp8_mha: whether
    `attngen.te` may return FP8.

    Raises: SpecError with every violation at once.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    reduce_amax: bool = True
    backward: str = "16"
    fp8_dpa: bool = True
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        reasons = _violations(self)
        given = self.margin, self.amax_history_len, self.amax_compute_algo
        reasons += delayed_violations(*given)
        if reasons:
            raise SpecError(reasons)

    def scale(self, amax: Tensor, dtype: torch.dtype, before: Tensor | float = 1.0) -> Tensor:
        """Scales of tensors with these largest magnitudes, float32; `before` where there is
        none."""
        return scale_of(amax, dtype, before, self.margin)

    def cast_rule(self, dtype: torch.dtype) -> CastRule:
        """How scales of tensors that are stored in that dtype follow where no history says them."""
        return CastRule(name_of(dtype), 0.0, self.margin, False)

    def amax_of(self, history: Tensor) -> Tensor:
        """The magnitudes that the next scales are made from, [n]. history: [steps, n], the newest
        first."""
        if callable(self.amax_compute_algo):
            return self.amax_compute_algo(history)
        return history.amax(0) if self.amax_compute_algo == "max" else history.select(0, 0)

    @property
    def gradient_form(self) -> GradientForm:
        """How a backward stores dO where no history says it."""
        if self.backward == "16":
            return GradientForm()
        dtype = name_of(self.fp8_format.backward)
        return GradientForm(dtype, self.margin, False, 0.0, self.backward == MIXED)

    def step_rule(self, dtype: torch.dtype) -> StepRule | None:
        """How scales follow where a step ends; None where a function of the history says it."""
        if callable(self.amax_compute_algo):
            return None
        of_all = self.amax_compute_algo == "max"
        return StepRule(name_of(dtype), 0, of_all, self.margin, False)


Recipe = DelayedScaling | Float8CurrentScaling


def _violations(recipe: Recipe) -> list[str]:
    """Faults of the fields that recipes share."""
    reasons = []
    found: object = recipe.fp8_format
    if not isinstance(found, Format):
        reasons.append(f"fp8_format needs Format.HYBRID or Format.E4M3; got {found!r}")
    if recipe.backward not in (*BACKWARDS, MIXED):
        reasons.append(f"backward needs {', '.join((*BACKWARDS, MIXED))}; got {recipe.backward!r}")
    return reasons
