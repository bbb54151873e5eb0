"""Attention as a layer, which keeps what delayed scaling has to know from step to step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import attention
from ...call.recipe import in_force
from ...results import AttentionAux
from .layer_scales import LayerScales
from .scaling import Active, InLayer


class Attention(nn.Module):
    """`attngen.attention` with scales of its own: each layer of a model has one.

    Without a recipe in force it is that function. amax_history_len: that of the DelayedScaling it
    is to serve; Float8CurrentScaling needs no layer, and keeps nothing in it.
    """

    def __init__(
        self, amax_history_len: int = 1024, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.scales = LayerScales(amax_history_len, device)

    def forward(
        self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **arguments: Any
    ) -> Tensor | tuple[Tensor, AttentionAux]:
        """The results of `attngen.attention(q, k, v, **arguments)`.

        Raises: as it does; SpecError where the recipe in force has another history.
        """
        active = in_force.recipe
        if not isinstance(active, Active):
            return attention(q, k, v, **arguments)  # type: ignore[no-any-return]
        in_force.recipe = InLayer(active, self.scales, torch.is_grad_enabled())
        try:
            return attention(q, k, v, **arguments)  # type: ignore[no-any-return]
        finally:
            in_force.recipe = active
