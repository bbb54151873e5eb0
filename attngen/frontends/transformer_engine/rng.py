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


class _HostState:
    """A state of the CPU's generator: numbers that a fork brings to it and takes back."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Have the CPU's generator be in this state, and note where it has come to."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


class _DeviceState:
    """A state of the current CUDA device's generator, which forks share with it: nothing is read,
    so that they can be captured."""

    def __init__(self) -> None:
        self.generator = torch.Generator(torch.device("cuda", torch.cuda.current_device()))

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Have the device's generator draw from this state."""
        current = torch.cuda.default_generators[torch.cuda.current_device()]
        before = current.graphsafe_get_state()
        current.graphsafe_set_state(self.generator)
        try:
            yield
        finally:
            current.graphsafe_set_state(before)


class CudaRNGStatesTracker:
    """States of the current device's generator (without a device, of the CPU's), each by its name.

    A fork draws from the state of a name, and leaves the generator as it was. Forks can be captured
    into CUDA graphs that know the states: those of `make_graphed_callables`, or after `register`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states and seeds."""
        self._states: dict[str, _HostState | _DeviceState] = {}
        self.seeds_: set[int] = set()

    @property
    def states_(self) -> States:
        """The states by their names, as they are now."""
        return self.get_states()

    def get_states(self) -> States:
        """Copies of the states by their names, uint8."""
        return {name: each.generator.get_state() for name, each in self._states.items()}

    def set_states(self, states: States) -> None:
        """Have these states instead. Graphs that know a name's state go on to draw from it."""
        known = {name: self._states.get(name) or _new_state() for name in states}
        for name, each in known.items():
            each.generator.set_state(states[name])
        self._states = known

    def add(self, name: str, seed: int) -> None:
        """Add the state that a seed begins with. Raises: RuntimeError for a name or seed that there
        is already."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} has a state already")
        if name in self._states:
            raise RuntimeError(f"state {name!r} is there already")
        self.seeds_.add(seed)
        self._states[name] = made = _new_state()
        made.generator.manual_seed(seed)

    def generators(self) -> list[torch.Generator]:
        """Generators of the states, which a graph that captures forks has to know."""
        return [each.generator for each in self._states.values()]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Have a graph know the states, before it captures forks."""
        for generator in self.generators():
            graph.register_generator_state(generator)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state of this name. Raises: KeyError where there is none."""
        if name not in self._states:
            raise KeyError(f"state {name!r} is not there; add it")
        with self._states[name].drawn_from():
            yield


def _new_state() -> _HostState | _DeviceState:
    return _DeviceState() if torch.cuda.is_available() else _HostState()


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
