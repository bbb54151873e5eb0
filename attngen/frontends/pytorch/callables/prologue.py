"""Work on whole captured tensors: what torch computes before a launch, for tensors of any call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from .trace import captured


@dataclass(frozen=True)
class Place:
    """One of the tensors that a function reaches, by its place."""

    place: int


@dataclass(frozen=True, eq=False)
class Step:
    """An operation of torch on tensors that a function reaches, and on results of others."""

    target: Any
    args: Any
    kwargs: Any

    def places(self) -> set[int]:
        """The tensors that it works on, by their places."""
        found: set[int] = set()

        def visit(each: Any) -> Any:
            if isinstance(each, Place):
                found.add(each.place)
            elif isinstance(each, Step):
                map_aggregate((each.args, each.kwargs), visit)
            return each

        visit(self)
        return found


Prologue = Place | Step


# Of operations whose results another call may have of other sizes, or other values.
_SURPRISING = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
}


class _Unknown(Exception):
    """A tensor that a function makes, or that nobody knows where to find again."""


def prologue_of(graph: GraphModule, node: Node, tensors: Sequence[Tensor]) -> Prologue | None:
    """How a captured tensor is made of those that a function reaches; None where it is made of
    others. No tensor is kept."""
    made: dict[Node, Prologue] = {}

    def step_of(each: Node) -> Any:
        if each not in made:
            if each.op == "get_attr":
                tensor = captured(graph, each)
                places = [place for place, x in enumerate(tensors) if x is tensor]
                if not places:
                    raise _Unknown
                made[each] = Place(min(places))
            elif each.op == "call_function" and not _SURPRISING & {
                *getattr(each.target, "tags", ())
            }:
                args, kwargs = map_arg((each.args, each.kwargs), step_of)
                made[each] = Step(each.target, args, kwargs)
            else:
                raise _Unknown
        return made[each]

    try:
        step_of(node)
    except _Unknown:
        return None
    return made[node]


def evaluate(prologue: Prologue, tensors: Sequence[Tensor]) -> Tensor:
    """The captured tensor of a call whose function reaches these."""
    if isinstance(prologue, Place):
        return tensors[prologue.place]
    found: dict[int, Any] = {}

    def value(each: Any) -> Any:
        if isinstance(each, Place):
            return tensors[each.place]
        if not isinstance(each, Step):
            return each
        if id(each) not in found:
            args, kwargs = map_aggregate((each.args, each.kwargs), value)
            found[id(each)] = each.target(*args, **kwargs)
        return found[id(each)]

    result: Tensor = value(prologue)
    return result
