"""FP8 recipes in modules: which is in force, and the scales that a module keeps for it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from ... import fp8
from ...call.recipe import in_force
from ...errors import SpecError

_MARK = b"attngen.fp8\0"  # before the state of a module's own


def recipe_in_force() -> Any:
    """The recipe of `attngen.fp8.autocast`; None in 16 bits."""
    return getattr(in_force.recipe, "recipe", None)


class ModuleScales:
    """Scales of a module's calls, in a layer that is made when a recipe first needs it; and state
    that was loaded, uint8."""

    def __init__(self) -> None:
        self.layer: fp8.Attention | None = None
        self.loaded: Tensor | None = None

    def layer_for(self, device: torch.device) -> fp8.Attention | None:
        """The layer of the recipe in force; None without one.

        Code that torch.compile traces makes no layer; one that a call before it made serves."""
        recipe = recipe_in_force()
        if recipe is None or (self.layer is None and torch.compiler.is_compiling()):
            return None
        steps = getattr(recipe, "amax_history_len", None)
        if self.layer is None or steps not in (None, self._steps):
            self.layer = _grown(self.layer, steps or 1, device)
        return self.layer

    @property
    def _steps(self) -> int:
        return 0 if self.layer is None else self.layer.scales.amax_history.shape[0]

    def output(self, out: Tensor) -> Tensor:
        """An output as an FP8 tensor, by its own largest magnitude; in 16 bits without a recipe.

        Raises: SpecError where the recipe keeps 16 bits between modules."""
        recipe = recipe_in_force()
        if recipe is None:
            return out
        if not recipe.fp8_mha:
            raise SpecError("fp8_output needs a recipe with fp8_mha=True")
        return fp8.CurrentQuantizer(recipe.fp8_format.forward, out.device)(out)

    def state(self) -> Tensor:
        """Scales and histories for a checkpoint, uint8; what was loaded where there are none."""
        if self.layer is None:
            return torch.empty(0, dtype=torch.uint8) if self.loaded is None else self.loaded
        file = io.BytesIO()
        torch.save(self.layer.state_dict(), file)
        return torch.frombuffer(bytearray(_MARK + file.getvalue()), dtype=torch.uint8)

    def load(self, state: Any) -> None:
        """Take such a state. state: a uint8 tensor, bytes, or None; TransformerEngine's is kept as
        it is, to be saved again."""
        if isinstance(state, io.BytesIO):
            state = state.getvalue()
        if isinstance(state, (bytes, bytearray)):
            state = torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else None
        self.loaded = state if state is not None and state.numel() else None
        self.layer = None
        if self.loaded is None:
            return
        text = bytes(self.loaded.cpu().tolist())
        if text.startswith(_MARK):
            found = torch.load(io.BytesIO(text[len(_MARK) :]), weights_only=True)
            history = found["scales.amax_history"]
            self.layer = fp8.Attention(history.shape[0], history.device)
            self.layer.load_state_dict(found)


def _grown(before: fp8.Attention | None, steps: int, device: torch.device) -> fp8.Attention:
    """A layer of so many steps, with the scales and the newest steps of the one before."""
    made = fp8.Attention(steps, device)
    if before is None:
        return made
    for name, new in made.scales.named_buffers():
        old = before.scales.get_buffer(name)
        count = min(old.shape[0], new.shape[0])
        new[:count].copy_(old[:count])
    return made
