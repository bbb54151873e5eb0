"""`autocast`: a recipe in force, and when the scales of its layers move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...call.recipe import Narrow, Narrowed, Quantised, StoredGradients, in_force
from ...call.recipe import Recipe as InForce
from ...call.table import CARRIERS
from ...errors import SpecError
from .layer_scales import LayerScales
from .recipes import DelayedScaling, Float8CurrentScaling, Recipe

DESCALES = tuple([f"descale_{name}" for name in CARRIERS])
Scales = tuple[Tensor, ...]


@dataclass(eq=False)
class Active:
    """A recipe in force.

    group: processes that share maxima, None for all. used: layers whose maxima were noted. tape:
    the scales of each call, in order, which a recomputation finds there again; replayed: how many
    of these it has taken, None while they are noted.
    """

    recipe: Recipe
    group: Any = None
    used: list[LayerScales] = field(default_factory=list)
    tape: list[Scales] | None = None
    replayed: int | None = None

    def quantise(
        self,
        carriers: Sequence[Tensor | None],
        rows: Sequence[Tensor | None],
        narrowed: Narrow,
    ) -> Quantised:
        """q, k and v as the recipe stores them. Raises: SpecError where it needs a layer."""
        return self.quantise_in(None, carriers, rows, narrowed, False)

    def quantise_in(
        self,
        layer: LayerScales | None,
        carriers: Sequence[Tensor | None],
        rows: Sequence[Tensor | None],
        narrowed: Narrow,
        notes: bool,
    ) -> Quantised:
        """q, k and v of a call in a layer. narrowed: casts tensors; notes: whether the layer's
        history learns of it.

        Raises: SpecError where the recipe needs a layer, or one with another history.
        """
        recipe = self.recipe
        present = [(x, used) for x, used in zip(carriers, rows, strict=True) if x is not None]
        tensors, used = zip(*present, strict=True)
        rule = recipe.cast_rule(recipe.fp8_format.forward)
        if rule.by_token:
            return self._by_token(carriers, narrowed(tensors, used, rule))
        found = narrowed(tensors, used, rule, self._known(layer, len(tensors)))
        self._learn(layer, found, notes)
        made, descales = iter(found.stored), _of_each([*found.descale])
        return Quantised(
            tuple([None if x is None else next(made) for x in carriers]),
            dict(zip(DESCALES, descales, strict=True)),
            self.stores_in(layer, notes),
        )

    def _by_token(self, carriers: Sequence[Tensor | None], found: Narrowed) -> Quantised:
        """q, k and v with a scale a token and head, which no history knows."""
        rows = _of_each([*found.by_row])
        made = iter(found.stored)
        return Quantised(
            tuple([None if x is None else next(made) for x in carriers]),
            dict(zip(DESCALES, rows, strict=True)),
            by_token=True,
        )

    def stored_gradients(self) -> StoredGradients:
        """How the backward of a call of FP8 operands stores its gradients."""
        return self.stores_in(None, False)

    def stores_in(self, layer: LayerScales | None, notes: bool) -> StoredGradients:
        """How the backward of a call in a layer stores its gradients. notes: whether the layer's
        history learns of it."""
        form = self.recipe.gradient_form
        stores = StoredGradients(form, self.recipe.backward == "fp8_or_16")
        if layer is None or not form.d_o_dtype:
            return stores
        if notes and self.replayed is None:
            self.used.append(layer)
        amax = layer.gradient_history.select(0, 0)
        return stores._replace(scale=layer.gradient_scale, amax=amax)

    def _known(self, layer: LayerScales | None, tensors: int) -> Tensor | None:
        """Scales of a call's tensors that are known before: of the call that is computed again, or
        by a layer's histories; None where there are none.

        Raises: SpecError where the recipe needs a layer, or one with another history.
        """
        if self.tape is not None and self.replayed is not None:
            return torch.cat(self.tape[self.replayed])
        if isinstance(self.recipe, DelayedScaling):
            return _histories_of(self.recipe, layer).scale[:tensors]
        return None

    def _learn(self, layer: LayerScales | None, found: Narrowed, notes: bool) -> None:
        """Keep what the tensors of a call had: scales on the tape, magnitudes in histories."""
        if self.replayed is not None:
            self.replayed += 1
            return
        if isinstance(self.recipe, DelayedScaling) and layer is not None and notes:
            layer.note(torch.cat(_of_each([*found.amax])))
            self.used.append(layer)
        if self.tape is not None:
            self.tape.append(found.scale)

    def end_step(self) -> None:
        """Move the scales of the layers that were used, once each, by the maxima of the group."""
        recipe = self.recipe
        layers = [*{id(layer): layer for layer in self.used}.values()]
        self.used.clear()
        if not layers:
            return
        delayed = recipe if isinstance(recipe, DelayedScaling) else None
        in_8_bits = bool(recipe.gradient_form.d_o_dtype)
        with torch.no_grad():
            if delayed and delayed.reduce_amax and dist.is_available() and dist.is_initialized():
                rows = [layer.amax_history.select(0, 0) for layer in layers]
                if in_8_bits:
                    rows += [layer.gradient_history.data.select(0, 0) for layer in layers]
                _share(rows, self.group)
            for layer in layers:
                if delayed:
                    layer.update(delayed)
                if in_8_bits:
                    layer.update_gradients(recipe)


@dataclass(eq=False)
class InLayer:
    """A recipe in force for the calls of one layer. notes: whether its history learns of them."""

    active: Active
    layer: LayerScales
    notes: bool

    def quantise(
        self,
        carriers: Sequence[Tensor | None],
        rows: Sequence[Tensor | None],
        narrowed: Narrow,
    ) -> Quantised:
        """q, k and v as the recipe stores them. Raises: SpecError."""
        return self.active.quantise_in(self.layer, carriers, rows, narrowed, self.notes)

    def stored_gradients(self) -> StoredGradients:
        """How the backward of a call of FP8 operands stores its gradients."""
        return self.active.stores_in(self.layer, self.notes)


class autocast:  # noqa: N801  # as torch.autocast
    """A context in which `attngen.attention` of 16-bit q, k and v runs in FP8.

    Gradients have 16 bits. Calls of other dtypes, of pages, and of FP8 tensors stay as they are.
    The process has one recipe in force, whichever of its threads asks. Where the outermost context
    of a recipe ends, delayed scales of layers that ran with gradients move.

    Args:
        enabled: False to have calls run in 16 bits again.
        recipe: Float8CurrentScaling, by default with its defaults, or DelayedScaling.
        group: processes that share maxima under DelayedScaling; None for torch's default group.

    Raises: SpecError where the recipe is none.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, group: Any = None
    ) -> None:
        recipe = Float8CurrentScaling() if recipe is None else recipe
        if not isinstance(recipe, (DelayedScaling, Float8CurrentScaling)):
            raise SpecError(
                f"recipe needs a Float8CurrentScaling or a DelayedScaling; got {recipe!r}"
            )
        self.enabled, self.recipe, self.group = enabled, recipe, group
        self._before: list[InForce | None] = []

    def __enter__(self) -> None:
        outer = in_force.recipe
        self._before.append(outer)
        if not (self.enabled and self.recipe.fp8_dpa):
            in_force.recipe = None
        elif not (isinstance(outer, Active) and self._continues(outer)):
            in_force.recipe = Active(self.recipe, self.group)

    def __exit__(self, *_: object) -> None:
        ended, in_force.recipe = in_force.recipe, self._before.pop()
        if isinstance(ended, Active) and ended is not in_force.recipe:
            ended.end_step()

    def _continues(self, outer: Active) -> bool:
        return outer.recipe == self.recipe and outer.group is self.group


def _histories_of(recipe: DelayedScaling, layer: LayerScales | None) -> LayerScales:
    """The layer of a call. Raises: SpecError where there is none, or one with another history."""
    if layer is None:
        raise SpecError(
            "DelayedScaling keeps its histories in layers: call an attngen.fp8.Attention(), "
            "or take Float8CurrentScaling()."
        )
    if (steps := layer.amax_history.shape[0]) != recipe.amax_history_len:
        raise SpecError(
            f"this layer keeps {steps} steps, the recipe {recipe.amax_history_len}. Make it "
            f"with Attention(amax_history_len={recipe.amax_history_len})."
        )
    return layer


def _of_each(parts: list[Tensor]) -> list[Tensor]:
    """Numbers of q, k and v, of which those of a packed tensor are one."""
    *_, last = parts
    return [*parts, *[last] * (len(CARRIERS) - len(parts))]


def _share(maxima: list[Tensor], group: Any) -> None:
    """Replace maxima by the largest of all processes of a group, in one exchange."""
    joined = torch.cat(maxima)
    dist.all_reduce(joined, dist.ReduceOp.MAX, group)
    parts = joined.split([each.numel() for each in maxima])
    for each, shared in zip(maxima, parts, strict=True):
        each.copy_(shared)
