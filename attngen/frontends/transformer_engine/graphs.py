"""`make_graphed_callables`: modules and functions whose calls replay CUDA graphs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import fp8
from ...call import taking as fields
from ...errors import SpecError
from .capturing import Captured, capture, uncollected

OLDER = {
    "fp8_enabled": "enabled",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
}


@dataclass(slots=True)
class Graphing:
    """Arguments of `make_graphed_callables`, by TransformerEngine's names."""

    modules: Any
    sample_args: Any
    num_warmup_iters: int = 3
    allow_unused_input: bool = False
    sample_kwargs: Any = None
    enabled: Any = None
    recipe: Any = None
    amax_reduction_group: Any = None
    pool: Any = None


@fields.taking(Graphing, OLDER)
def make_graphed_callables(given: Graphing) -> Any:
    """Have calls of modules or functions replay CUDA graphs; the modules themselves, or functions.

    Each is captured for its sample_args and sample_kwargs, whose tensors become the buffers that
    calls are copied to: calls take tensors of the same shapes and dtypes. What is no tensor stays
    as in the sample. A module that trains gets a graph of its backward too; one that does not has
    no gradients, and a module in the other state than when it was captured is called as it was.
    Random states of trackers, from which dropout draws, are registered with the graphs.

    modules: one or a tuple of them, with samples likewise; enabled, recipe, amax_reduction_group:
    as of `attngen.fp8.autocast`; pool: of another graph's memory.

    Python's cyclic garbage is collected before, and none while callables are captured. Where one
    cannot be captured, its error is raised, and random states draw as before.

    Raises: SpecError where samples do not fit the callables.
    """
    one = not isinstance(given.modules, tuple)
    modules = (given.modules,) if one else given.modules
    samples = _each(given.sample_args, one, len(modules), "sample_args", ())
    named = _each(given.sample_kwargs, one, len(modules), "sample_kwargs", {})
    enabled = given.enabled if isinstance(given.enabled, tuple) else [given.enabled] * len(modules)
    pool = torch.cuda.graph_pool_handle() if given.pool is None else given.pool
    made = []
    for module, args, kwargs, in_8_bits in zip(modules, samples, named, enabled, strict=True):
        inside = (bool(in_8_bits), given.recipe, given.amax_reduction_group)
        made.append(_Callable.of(module, args, kwargs, inside, pool))
    for each in made:
        each.allow_unused = given.allow_unused_input
        each.warm_up(given.num_warmup_iters)
    with uncollected():
        for each in made:
            each.capture_forward()
        for each in reversed(made):
            each.capture_backward()
    found = tuple([each.installed() for each in made])
    if not one:
        return found
    (alone,) = found
    return alone


def _each(value: Any, one: bool, count: int, name: str, default: Any) -> list[Any]:
    """The sample of each callable. Raises: SpecError where there are more or fewer."""
    if value is None:
        return [default] * count
    found = [value] if one else [*value]
    if len(found) != count:
        raise SpecError(f"{name} needs one entry for each of {count} callables; got {len(found)}")
    return found


@dataclass(eq=False)
class _Callable:
    """A module or function with its sample, whose tensors are the graph's inputs.

    call: the callable as it was; inside: arguments of the recipe's context; leaves: of the sample's
    arguments in their order, shape: how they nest; allow_unused:
    whether some of what learns may not take part.
    """

    owner: Any
    call: Callable[..., Any]
    inside: tuple[Any, ...]
    pool: Any
    names: tuple[str, ...]
    leaves: list[Any]
    shape: pytree.TreeSpec
    allow_unused: bool = False

    @classmethod
    def of(cls, owner: Any, args: Any, kwargs: Any, inside: tuple[Any, ...], pool: Any) -> Any:
        """A callable and its sample. Raises: SpecError where the sample is no tuple and dict."""
        if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
            raise SpecError("a sample is a tuple of arguments, and a dict of those by name")
        leaves, shape = pytree.tree_flatten((tuple(args), kwargs))
        call = owner.forward if isinstance(owner, nn.Module) else owner
        return cls(owner, call, inside, pool, tuple(kwargs), leaves, shape)

    def __post_init__(self) -> None:
        of_module = isinstance(self.owner, nn.Module)
        self.inputs = [x for x in self.leaves if isinstance(x, Tensor)]
        self.parameters = [*self.owner.parameters()] if of_module else []
        self.learning = [x for x in (*self.inputs, *self.parameters) if x.requires_grad]
        self.trains = self.owner.training if of_module else bool(self.learning)
        self.gradients: Captured | None = None

    def run(self) -> Any:
        """The results of the callable for what is in the buffers."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.shape)
        enabled, recipe, group = self.inside
        with torch.set_grad_enabled(self.trains), fp8.autocast(enabled, recipe, group):
            return self.call(*args, **kwargs)

    def generators(self) -> list[torch.Generator]:
        """Random states of the module's trackers."""
        parts = self.owner.modules() if isinstance(self.owner, nn.Module) else ()
        trackers = {id(x): x for x in (getattr(m, "rng_states_tracker", None) for m in parts)}
        return [each for x in trackers.values() for each in getattr(x, "generators", lambda: ())()]

    def warm_up(self, times: int) -> None:
        """Call it, and its backward, on a stream beside: what is made once is made here."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                self._hold(self.run())
                if self.learned:
                    self.differentiate()
        torch.cuda.current_stream().wait_stream(stream)

    def _hold(self, results: Any) -> None:
        """Have these be the outputs, and gradients of them in buffers."""
        self.outputs, self.result_shape = pytree.tree_flatten(results)
        self.d_outputs = [torch.zeros_like(x) for x in self.learned]

    @property
    def learned(self) -> list[Tensor]:
        """The outputs that have gradients."""
        if not (self.trains and self.learning):
            return []
        return [x for x in self.outputs if isinstance(x, Tensor) and x.requires_grad]

    def differentiate(self) -> tuple[Tensor | None, ...]:
        """Gradients of what learns, from those of the outputs in their buffers."""
        given = self.learned, self.learning, self.d_outputs
        return torch.autograd.grad(*given, allow_unused=self.allow_unused)

    def capture_forward(self) -> None:
        """Capture the call."""
        self.forward = capture(self.run, self.pool, self.generators())
        self._hold(self.forward.results)

    def capture_backward(self) -> None:
        """Capture the gradients of what learns, where there are any."""
        if self.learned:
            self.gradients = capture(self.differentiate, self.pool, self.generators())

    def installed(self) -> Any:
        """The module, whose calls replay from now on while it is in this state; or a function."""
        recording = self.recording()
        if not isinstance(self.owner, nn.Module):
            return recording
        self.owner.forward = _dispatch(self.owner, self.call, recording)
        return self.owner

    def recording(self) -> _Recording:
        """The captured work, without the callable and the autograd graph of its outputs."""
        learned = {id(x) for x in self.learned}
        of_outputs = [id(x) in learned for x in self.outputs]
        gradients: list[Tensor | None] = []
        if self.gradients is not None:
            made = dict(zip(map(id, self.learning), self.gradients.results, strict=True))
            gradients = [made.get(id(x)) for x in (*self.inputs, *self.parameters)]
        return _Recording(
            names=self.names,
            leaves=self.leaves,
            shape=self.shape,
            inputs=self.inputs,
            parameters=self.parameters,
            outputs=[x.detach() if isinstance(x, Tensor) else x for x in self.outputs],
            result_shape=self.result_shape,
            replay=self.forward.replay,
            learned=of_outputs,
            d_outputs=self.d_outputs,
            gradients=gradients,
            replay_backward=None if self.gradients is None else self.gradients.replay,
        )


def _dispatch(module: nn.Module, call: Callable[..., Any], recording: _Recording) -> Any:
    """The module's forward: it replays while the module is in the state that it is in now, and
    calls it as it was in the other. It does not hold the module, which holds it: graphs go with
    the module, not where cycles are collected."""
    alive, state = weakref.ref(module), module.training
    own = inspect.ismethod(call) and call.__self__ is module
    original: Callable[[], Any] = weakref.WeakMethod(call) if own else lambda: call

    def forward(*args: Any, **kwargs: Any) -> Any:
        owner = alive()
        replays = owner is None or owner.training == state
        return (recording if replays else original())(*args, **kwargs)

    return forward


@dataclass(eq=False)
class _Recording:
    """A captured callable, which no longer knows the module that it was.

    names, leaves, shape: of the sample, as in _Callable; outputs: where replays leave them,
    learned: which of them have gradients, result_shape: how they nest; d_outputs: buffers of the
    gradients of outputs; gradients: those of inputs and parameters, where there are any.
    """

    names: tuple[str, ...]
    leaves: list[Any]
    shape: pytree.TreeSpec
    inputs: list[Tensor]
    parameters: list[Tensor]
    outputs: list[Any]
    result_shape: pytree.TreeSpec
    replay: Callable[[], None]
    learned: list[bool]
    d_outputs: list[Tensor]
    gradients: list[Tensor | None]
    replay_backward: Callable[[], None] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results for other tensors; arguments by name that are absent stay as they were."""
        sample: dict[str, Any]
        _, sample = pytree.tree_unflatten(self.leaves, self.shape)
        named = {name: kwargs.get(name, sample[name]) for name in self.names}
        leaves, shape = pytree.tree_flatten((args, named))
        if shape != self.shape or kwargs.keys() - {*self.names}:
            raise SpecError("a captured callable takes the arguments that its sample had")
        places = [place for place, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        given = [leaves[place] for place in places]
        if self.replay_backward is None:
            self.take(self.inputs, given)
            self.replay()
            found = self.found()
        else:
            found = [*_Replayed.apply(self, *given, *self.parameters)]  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(found, self.result_shape)

    def found(self) -> list[Any]:
        """The outputs, each a tensor of its own over the memory that replays write."""
        return [x.detach() if isinstance(x, Tensor) else x for x in self.outputs]

    @staticmethod
    def take(buffers: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Copy tensors to buffers, where they are others. Raises: SpecError for other shapes."""
        for buffer, x in zip(buffers, given, strict=True):
            if x.shape != buffer.shape or x.dtype != buffer.dtype:
                raise SpecError(
                    f"captured for {buffer.dtype} {[*buffer.shape]}; got {x.dtype} {[*x.shape]}"
                )
            if x.data_ptr() != buffer.data_ptr():
                buffer.copy_(x)


class _Replayed(torch.autograd.Function):
    """A captured call with a captured backward."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *given: Tensor) -> tuple[Any, ...]:
        """The outputs, in their order; given: inputs, then the parameters, which stay."""
        ctx.recording = recording
        with torch.no_grad():
            recording.take(recording.inputs, given[: len(recording.inputs)])
        recording.replay()
        found = recording.found()
        pairs = zip(recording.learned, found, strict=True)
        plain = [x for learned, x in pairs if isinstance(x, Tensor) and not learned]
        ctx.mark_non_differentiable(*plain)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Any, ...]:
        """The gradients of inputs and parameters, the latter in memory of their own."""
        recording = ctx.recording
        assert recording.replay_backward is not None  # else the call has none
        pairs = zip(recording.learned, d_outputs, strict=True)
        recording.take(recording.d_outputs, [d for learned, d in pairs if learned])
        recording.replay_backward()
        count = len(recording.inputs)
        of_inputs, of_parameters = recording.gradients[:count], recording.gradients[count:]
        return (
            None,
            *(x if x is None else x.detach() for x in of_inputs),
            *(x if x is None else x.clone() for x in of_parameters),
        )
