"""Recent calls: one like another, whose tensors differ in their addresses alone, needs no second
look at its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

# What torch.compile tells calls apart with: type, dtype, device, sizes, strides, dispatch keys and
# whether there will be a gradient, in a quarter of the time that Python needs for a key of these.
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from .operation import Ready, run, undisturbed
from .signature import Operands

_KEPT = 4  # with the same arguments; older ones are found by a key of all formats
_KEYS = 1024

Call = tuple[tuple[Any, ...], list[Tensor]]  # arguments and which tensors there are, and these
_recent: dict[tuple[Any, ...], list[tuple[TensorGuards, Ready]]] = {}


def serve(arguments: tuple[Any, ...], tensors: list[Tensor]) -> Tensor | None:
    """The output, if there was a recent call of these arguments and of tensors of these formats,
    and nobody looks on. Raises: SpecError, LaunchError."""
    try:
        kept = _recent.get(arguments, ())
    except TypeError:  # an argument has no hash: its check says what it needs
        return None
    for guards, ready in kept:
        if guards.check(*tensors):
            watched = forward_ad._current_level >= 0 or not undisturbed()
            return None if watched else run(ready, tensors)[0]
    return None


def note(
    arguments: tuple[Any, ...], tensors: list[Tensor], operands: Operands, ready: Ready
) -> None:
    """Remember a call that went straight to its kernels. operands: what became of its tensors."""
    # It has to be told that no size or stride may vary.
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
    homes = [None if x is None else place_of.get(id(x), -1) for x in operands]
    # All but a tensor given twice, one cast, and one that addresses parts of another.
    if not guards.check(*tensors) or -1 in homes or any(x[2] for x in ready.sources):
        return
    if len(_recent) >= _KEYS:
        _recent.clear()
    # In one assignment: another thread may be looking.
    kept = _recent.get(arguments, [])[: _KEPT - 1]
    _recent[arguments] = [(guards, _placed(ready, homes)), *kept]


def _placed(ready: Ready, homes: list[int | None]) -> Ready:
    """The same for a call's own tensors alone. homes: of each operand, its place among these."""
    known = {name: homes[place] for place, name in ready.operands}
    known |= {name: known[source] for name, source, _ in ready.sources}
    places = tuple((place, name) for name, place in known.items() if place is not None)
    unaligned = ready.unaligned

    def elsewhere(tensors: Operands) -> Ready:
        assert unaligned is not None  # else nobody asks
        operands = tuple(None if home is None else tensors[home] for home in homes)
        return _placed(unaligned(operands), homes)

    return replace(
        ready, operands=places, sources=(), unaligned=None if unaligned is None else elsewhere
    )
