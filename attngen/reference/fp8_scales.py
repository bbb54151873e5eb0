"""Scales of tensors that are stored in 8 bits: which follow from the largest magnitudes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.recipe import CastRule, Narrowed, StepRule
from .fp8 import quantise


def largest(x: Tensor, rows: Tensor | None = None) -> Tensor:
    """The largest magnitude of a tensor, float32 [1]; 0 of an empty one. Never waits.

    rows: a broadcast of it, where its numbers count; what others hold, NaN too, does not.
    """
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    x = x.detach() if rows is None else torch.where(rows, x.detach(), 0.0)
    # One pass, which writes no magnitudes down.
    found: Tensor = torch.linalg.vector_norm(x, math.inf)
    return found.float().reshape(1)


def stored(x: Tensor, dtype: torch.dtype, scale: Tensor, power_of_two: bool = False) -> Tensor:
    """A tensor in 8 bits. power_of_two: whether the scale is one, float32 [1], by which bfloat16
    numbers are multiplied as they are, without a rounding and without wider copies."""
    x = x.detach()
    if power_of_two and x.dtype == torch.bfloat16:
        return quantise(x, dtype, scale.reshape(()))
    return quantise(x.float(), dtype, scale)


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


def current_scale(
    amax: Tensor, dtype: torch.dtype, margin: int, power_of_two: bool, epsilon: float
) -> Tensor:
    """Scales of tensors from their own largest magnitudes, of at least epsilon, float32; 1 where
    there is none. power_of_two: the next one below instead."""
    amax = amax.clamp_min(epsilon) if epsilon else amax
    found = scale_of(amax, dtype, 1.0, margin)
    return power_of_two_below(found) if power_of_two else found


def end_step(scale: Tensor, history: Tensor, rule: StepRule) -> None:
    """End a step: the next scales, float32 [n], follow from the largest magnitudes, float32
    [steps, n], the newest first, which a row of zeros enters, and the oldest leaves."""
    amax = history.amax(0) if rule.of_all else history.select(0, 0)
    found = scale_of(amax, getattr(torch, rule.dtype), scale, rule.margin)
    found = power_of_two_below(found) if rule.power_of_two else found
    scale.copy_(found)
    scale[: rule.own].zero_()
    begin_row(history)


def begin_row(history: Tensor) -> None:
    """Have a history begin a step: the oldest row leaves it."""
    history.copy_(history.roll(1, 0))
    history.select(0, 0).zero_()


def narrowed(
    tensors: Sequence[Tensor],
    used: Sequence[Tensor | None],
    rule: CastRule,
    known: Tensor | None = None,
) -> Narrowed:
    """Tensors in 8 bits, of any floating dtype. Arguments as of `call.recipe.Narrow`."""
    if rule.by_token:
        return _narrowed_by_token(tensors, rule)
    dtype = getattr(torch, rule.dtype)
    amax = [largest(x, rows) for x, rows in zip(tensors, used, strict=True)]
    scales = [current_scale(x, dtype, rule.margin, rule.power_of_two, rule.least) for x in amax]
    if known is not None:
        pairs = zip(known.split(1), scales, strict=True)
        scales = [torch.where(scale > 0, scale, own) for scale, own in pairs]
    pairs = zip(tensors, scales, strict=True)
    made = tuple([stored(x, dtype, scale, rule.power_of_two) for x, scale in pairs])
    amaxes, factors = torch.stack(amax), torch.stack(scales)
    return Narrowed(made, torch.stack([amaxes, factors, factors.reciprocal()]))


def _narrowed_by_token(tensors: Sequence[Tensor], rule: CastRule) -> Narrowed:
    """Tensors in 8 bits with a scale of each row: nothing that other rows hold changes it."""
    dtype = getattr(torch, rule.dtype)
    made, numbers, by_row = [], [], []
    for x in tensors:
        x = x.detach()
        amax = torch.linalg.vector_norm(x, math.inf, dim=-1).float()
        scale = current_scale(amax, dtype, rule.margin, rule.power_of_two, rule.least)
        made.append(quantise(x.float(), dtype, scale[..., None]))
        by_row.append(scale.reciprocal())
        numbers.append(torch.stack([amax, scale, by_row[-1]]).flatten(1))
    return Narrowed(tuple(made), torch.cat(numbers, dim=1), tuple(by_row))
