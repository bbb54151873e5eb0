"""Recipes: how scales follow from the largest magnitudes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...errors import SpecError

ALGORITHMS = ("max", "most_recent")


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
    a rounding. amax_epsilon: the least magnitude that is taken.

    Raises: SpecError with every violation at once.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        reasons = [*_format_violations(self.fp8_format)]
        if not 0 <= self.amax_epsilon < float("inf"):
            reasons.append(f"amax_epsilon needs a number >= 0; got {self.amax_epsilon!r}")
        if reasons:
            raise SpecError(reasons)

    def scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales of tensors with these largest magnitudes, float32; 1 where there is none."""
        amax = amax.clamp_min(self.amax_epsilon) if self.amax_epsilon else amax
        found = scale_of(amax, dtype, 1.0)
        return power_of_two_below(found) if self.use_power_2_scales else found


@dataclass(frozen=True)
class DelayedScaling:
    """Scales of the largest magnitudes in the steps before, which a layer keeps.

    A tensor's first step, of which there is no history, takes its own largest magnitude. margin:
    binades left free above it. amax_history_len: steps that are remembered. amax_compute_algo: the
    largest of these (max), that of the step before (most_recent), or a function of the history,
    float32 [amax_history_len, n], that returns [n]. reduce_amax: whether processes of a group share
    their maxima.

    Raises: SpecError with every violation at once.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        reasons = [*_format_violations(self.fp8_format)]
        if not isinstance(self.margin, int) or abs(self.margin) > 64:
            reasons.append(f"margin needs an int in -64..64; got {self.margin!r}")
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            reasons.append(f"amax_history_len needs an int >= 1; got {self.amax_history_len!r}")
        if not (callable(self.amax_compute_algo) or self.amax_compute_algo in ALGORITHMS):
            allowed = ", ".join(ALGORITHMS)
            got = f"got {self.amax_compute_algo!r}"
            reasons.append(f"amax_compute_algo needs {allowed} or a function; {got}")
        if reasons:
            raise SpecError(reasons)

    def scale(self, amax: Tensor, dtype: torch.dtype, before: Tensor | float = 1.0) -> Tensor:
        """Scales of tensors with these largest magnitudes, float32; `before` where there is
        none."""
        return scale_of(amax, dtype, before, self.margin)

    def amax_of(self, history: Tensor) -> Tensor:
        """The magnitudes that the next scales are made from, [n]. history: [steps, n], the newest
        first."""
        if callable(self.amax_compute_algo):
            return self.amax_compute_algo(history)
        return history.amax(0) if self.amax_compute_algo == "max" else history.select(0, 0)


Recipe = DelayedScaling | Float8CurrentScaling


def scale_of(amax: Tensor, dtype: torch.dtype, before: Tensor | float, margin: int = 0) -> Tensor:
    """Scales by which tensors with these largest magnitudes fill an 8-bit format but for `margin`
    binades, at most 2^126; `before` where a magnitude is 0, infinite or NaN."""
    amax = amax.float()
    scale = (torch.finfo(dtype).max / amax * 2.0**-margin).clamp(2.0**-126, 2.0**126)
    usable = (amax > 0) & (amax < float("inf"))
    return torch.where(usable, scale, before)


def power_of_two_below(x: Tensor) -> Tensor:
    """The largest powers of two that are not above normal positive float32 numbers."""
    exponent = x.view(torch.int32).bitwise_and(0x7F800000)
    return exponent.view(torch.float32)


def _format_violations(fp8_format: Any) -> list[str]:
    if isinstance(fp8_format, Format):
        return []
    return [f"fp8_format needs Format.HYBRID or Format.E4M3; got {fp8_format!r}"]
