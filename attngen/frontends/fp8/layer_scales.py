"""LayerScales: what recipes keep of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...call.table import CARRIERS
from ...reference.fp8_scales import begin_row
from .recipes import DelayedScaling, Recipe

GRADIENTS = ("d_o", "ds")
_FORWARD = ("scale", "amax_history")
_BACKWARD = ("gradient_scale", "gradient_history")


class LayerScales(nn.Module):
    """Scales and the history of the largest magnitudes, as buffers.

    scale: of q, k and v, float32 [3], 0 before the first step. amax_history: float32 [steps, 3],
    the step that runs first. gradient_scale, gradient_history: of dO and dS, [2] and [steps, 2].
    All stay float32 whatever dtype a module around is cast to.
    """

    scale: Tensor
    amax_history: Tensor
    gradient_scale: Tensor
    gradient_history: Tensor

    def __init__(self, steps: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        for names, count in ((_FORWARD, len(CARRIERS)), (_BACKWARD, len(GRADIENTS))):
            for name, shape in zip(names, ((count,), (steps, count)), strict=True):
                zeros = torch.zeros(shape, dtype=torch.float32, device=device)
                self.register_buffer(name, zeros)

    def note(self, amax: Tensor) -> None:
        """Have the history know the magnitudes of a call, [3]."""
        now = self.amax_history.select(0, 0)
        now.copy_(torch.maximum(now, amax))

    def update(self, recipe: DelayedScaling) -> None:
        """End a step of a forward: the next scales follow from the history, which a new row
        enters."""
        _end(self.scale, self.amax_history, recipe, recipe.fp8_format.forward)

    def update_gradients(self, recipe: Recipe) -> None:
        """End a step of a backward in the same way.

        Autograd does not count it as a change: a backward that is to come takes what is there
        then."""
        scale, history = self.gradient_scale.data, self.gradient_history.data
        _end(scale, history, recipe, recipe.fp8_format.backward)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def _end(scale: Tensor, history: Tensor, recipe: Recipe, dtype: torch.dtype) -> None:
    """End a step of scales of a dtype and their history, [steps, n]."""
    rule = recipe.step_rule(dtype)
    if rule is not None:
        torch.ops.attngen.end_step(scale, history, *rule)
        return
    assert isinstance(recipe, DelayedScaling)  # whose function of the history says it
    scale.copy_(recipe.scale(recipe.amax_of(history), dtype, scale))
    begin_row(history)
