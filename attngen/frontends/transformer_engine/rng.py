"""Random states by name, and checkpoints of a computation that draws from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from ... import fp8
from ...call.recipe import in_force

States = dict[str, Tensor]
T = TypeVar("T")


def _state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


class CudaRNGStatesTracker:
    """States of the current device's generator (without a device, of the CPU's), each by its name.

    A fork draws from the state of a name, and leaves the generator as it was. No fork can be
    captured into a CUDA graph.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states and seeds."""
        self.states_: States = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> States:
        """The states by their names; forks replace them in the tracker, not in this copy."""
        return dict(self.states_)

    def set_states(self, states: States) -> None:
        """Have these states instead."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state that a seed begins with. Raises: RuntimeError for a name or seed that there
        is already."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} has a state already")
        if name in self.states_:
            raise RuntimeError(f"state {name!r} is there already")
        self.seeds_.add(seed)
        before = _state()
        torch.manual_seed(seed) if not torch.cuda.is_available() else torch.cuda.manual_seed(seed)
        self.states_[name] = _state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state of this name. Raises: KeyError where there is none."""
        if name not in self.states_:
            raise KeyError(f"state {name!r} is not there; add it")
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


def checkpointed(function: Callable[[], T], tracker: Any) -> T:
    """Call a function that the backward calls anew instead of keeping what it saves: with the
    device's random state as it was, a tracker's, where there is one, and scales of FP8."""
    more: dict[str, Any] = {"use_reentrant": False}
    if in_force.recipe is not None:
        more["context_fn"] = fp8.checkpoint_contexts
    if tracker is None:
        return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
            function, **more
        )
    first: list[Any] = []

    def with_states() -> T:
        if not first:
            first.append(dict(tracker.get_states()))
            return function()
        now = dict(tracker.get_states())
        tracker.set_states(*first)
        try:
            return function()
        finally:
            tracker.set_states(now)

    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
        with_states, **more
    )
