"""LayerScales: what delayed scaling keeps of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...call.table import CARRIERS
from .recipes import DelayedScaling


class LayerScales(nn.Module):
    """Scales of q, k and v and the history of their largest magnitudes, as buffers.

    scale: float32 [3], 0 before the first step. amax_history: float32 [steps, 3], the step that
    runs first. Both stay float32 whatever dtype a module around is cast to.
    """

    scale: Tensor
    amax_history: Tensor

    def __init__(self, steps: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        kinds = {"dtype": torch.float32, "device": device}
        self.register_buffer("scale", torch.zeros(len(CARRIERS), **kinds))  # type: ignore[arg-type]
        history = torch.zeros(steps, len(CARRIERS), **kinds)  # type: ignore[arg-type]
        self.register_buffer("amax_history", history)

    def scales(self, recipe: DelayedScaling, amax: Tensor) -> Tensor:
        """The scales of a call, [3]. amax: its magnitudes, taken where there is no history."""
        first = recipe.scale(amax, recipe.fp8_format.forward)
        return torch.where(self.scale > 0, self.scale, first)

    def note(self, amax: Tensor) -> None:
        """Have the history know the magnitudes of a call, [3]."""
        now = self.amax_history.select(0, 0)
        now.copy_(torch.maximum(now, amax))

    def update(self, recipe: DelayedScaling) -> None:
        """End a step: the next scales follow from the history, which a new row enters."""
        amax = recipe.amax_of(self.amax_history)
        self.scale.copy_(recipe.scale(amax, recipe.fp8_format.forward, self.scale))
        self.amax_history.copy_(self.amax_history.roll(1, 0))
        self.amax_history.select(0, 0).zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
