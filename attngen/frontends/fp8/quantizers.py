"""Quantizers: what stores a tensor in 8 bits, and what is known of its scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import SpecError
from ...reference.fp8 import DTYPES
from ...reference.fp8_scales import largest, stored
from .recipes import DelayedScaling, Float8CurrentScaling
from .tensor import Float8Tensor


class Quantizer:
    """A stored dtype with one scale, which its owner sets: `scale`, its reciprocal `scale_inv` and
    `amax`, the largest magnitude stored so far, are float32 [1] on the device.

    Calling it with a 16-bit or float32 tensor gives a `Float8Tensor`, to which gradients pass
    straight through. Nothing waits for the device, so that calls may be captured.

    Raises: SpecError where dtype is no FP8 dtype of torch.
    """

    stores_by_powers_of_two = False

    def __init__(self, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        if dtype not in DTYPES:
            raise SpecError(f"dtype needs one of {DTYPES}; got {dtype!r}")
        self.dtype = dtype
        self.scale = torch.ones(1, dtype=torch.float32, device=device)
        self.scale_inv = torch.ones(1, dtype=torch.float32, device=device)
        self.amax = torch.zeros(1, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Float8Tensor:
        """The tensor in 8 bits; of x's shape, nominally of its dtype."""
        return _Quantise.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def store(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers in 8 bits, and what one stands for, float32 [1]; notes the magnitude."""
        amax = largest(x)
        torch.maximum(self.amax, amax, out=self.amax)
        self.prepare(amax)
        made = stored(x, self.dtype, self.scale, self.stores_by_powers_of_two)
        return made, self.scale_inv.clone()

    def create_tensor_from_data(
        self, data: Tensor, fake_dtype: torch.dtype = torch.float32
    ) -> Float8Tensor:
        """A tensor of numbers that were stored by the scale of now. data: FP8, or uint8 that holds
        them; fake_dtype: nominal."""
        found = data.view(self.dtype) if data.dtype == torch.uint8 else data
        return Float8Tensor(found, self.scale.reciprocal(), fake_dtype)

    def prepare(self, amax: Tensor) -> None:
        """Set the scale for a tensor of this largest magnitude, [1]; here it stays as it is."""

    def set_scale(self, scale: Tensor) -> None:
        """Take a scale, float32 [1], and its reciprocal."""
        self.scale.copy_(scale)
        self.scale_inv.copy_(scale.reciprocal())


class CurrentQuantizer(Quantizer):
    """A quantizer whose scale follows from each tensor that it stores."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        recipe: Float8CurrentScaling | None = None,
    ) -> None:
        super().__init__(dtype, device)
        self.recipe = Float8CurrentScaling() if recipe is None else recipe
        self.stores_by_powers_of_two = self.recipe.use_power_2_scales

    def prepare(self, amax: Tensor) -> None:
        """Set the scale that the recipe has for this magnitude."""
        self.set_scale(self.recipe.scale(amax, self.dtype))


class DelayedQuantizer(Quantizer):
    """A quantizer whose scale follows from the steps before; `update` ends one."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        recipe: DelayedScaling | None = None,
    ) -> None:
        super().__init__(dtype, device)
        self.recipe = DelayedScaling() if recipe is None else recipe
        steps = self.recipe.amax_history_len
        self.amax_history = torch.zeros(steps, 1, dtype=torch.float32, device=device)

    def prepare(self, amax: Tensor) -> None:
        """Set the scale of a first tensor, of which there is no history, from its own magnitude."""
        known = self.amax_history.amax() > 0
        first = self.recipe.scale(amax, self.dtype)
        self.set_scale(torch.where(known, self.scale, first))

    def update(self) -> None:
        """End a step: its magnitude enters the history, and the next scale follows."""
        self.amax_history.copy_(rolled(self.amax_history))
        self.amax_history.select(0, 0).copy_(self.amax)
        amax = self.recipe.amax_of(self.amax_history)
        self.set_scale(self.recipe.scale(amax, self.dtype, self.scale))
        self.amax.zero_()


def rolled(history: Tensor) -> Tensor:
    """A history, [steps, n], a step later: the oldest row comes first, to be overwritten."""
    return history.roll(1, 0)


class _Quantise(torch.autograd.Function):
    """The rounding to 8 bits, through which gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Float8Tensor:
        stored, scale_inv = quantizer.store(x)
        return Float8Tensor(stored, scale_inv, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
