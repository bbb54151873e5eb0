"""Activation checkpointing under a recipe: a recomputation has the scales of its forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from ...call.recipe import Recipe, in_force
from .scaling import Active


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward and of its recomputation, for `torch.utils.checkpoint.checkpoint(…,
    use_reentrant=False, context_fn=attngen.fp8.checkpoint_contexts)`.

    The recomputation has the recipe, and the scales, that were in force in the forward, wherever
    the backward runs; histories learn nothing of it.
    """
    active = in_force.recipe
    if not isinstance(active, Active):
        return nullcontext(), nullcontext()
    noted = replace(active, tape=[])
    return _InForce(noted), _InForce(replace(noted, replayed=0))


class _InForce:
    """A recipe in force, as often as it is entered: a backward may come again."""

    def __init__(self, active: Active) -> None:
        self.active = active
        self._before: list[Recipe | None] = []

    def __enter__(self) -> None:
        self._before.append(in_force.recipe)
        in_force.recipe = self.active
        if self.active.replayed is not None:
            self.active.replayed = 0

    def __exit__(self, *_: object) -> None:
        in_force.recipe = self._before.pop()
