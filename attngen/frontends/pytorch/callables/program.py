"""Programs of callables: what a traced function computes, in the terms that kernels are made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ....errors import SpecError
from ....fragments.building import Number
from ....fragments.program import Program
from .builder import Builder, as_read, capture_of
from .lines import Lines
from .trace import differentiate, loads_of, result_of

_PLACES = ("s", "b", "h", "i", "j")
_NOTHING = "f:0.0"


@dataclass(frozen=True, eq=False)
class Traced:
    """A callable's program, with what a call passes for it: captured tensors, and numbers.

    sources: the tensors as the callable has them; origins: the nodes of a fresh trace that these
    are; key: its fingerprint, None where what it computes
    may depend on more; merged: whether some of them are one because they lie in one place.
    """

    program: Program
    captures: tuple[Tensor, ...]
    numbers: tuple[Number, ...]
    sources: tuple[Tensor, ...] = ()
    origins: tuple[tuple[GraphModule, Node], ...] = ()
    key: tuple[Any, ...] | None = None
    merged: bool = False


def mask_program(graph: GraphModule) -> Traced:
    """The program of a traced `mask_mod`, whose value is a bool and whose slope 0.

    Raises: as `score_program`.
    """
    builder = Builder()
    lines = Lines(builder, graph, _PLACES[1:], "mask_mod", graph.meta["lines"])
    return _traced(builder, lines.number(result_of(graph), "b"), _NOTHING)


def score_program(graph: GraphModule, device: torch.device) -> Traced:
    """The program of a traced `score_mod`, and of its derivative.

    Raises: SpecError naming what no kernel can do, the line and the way out.
    """
    builder = Builder()
    lines = graph.meta["lines"]
    forward = Lines(builder, graph, _PLACES, "score_mod", lines)
    for node in graph.graph.nodes:  # before autograd meets what it cannot differentiate
        if node.op == "call_function":
            forward.check_pure(node)
    cut = list(loads_of(graph))
    loads = [forward.number(node, "f") for node in cut]
    learned = [builder.learns(each) for each in loads]
    try:
        joint = differentiate(graph, device, cut, learned)
    except RuntimeError as error:  # of autograd, and of what has no value in a trace
        reason, *_ = str(error).splitlines()
        raise SpecError(
            f"score_mod has no derivative that is traced without values: {reason}. Pass "
            "backend='reference'."
        ) from error
    both = Lines(builder, joint, (*_PLACES, *loads), "score_mod", lines)
    value, slope, *derivatives = (both.number(each, "f") for each in result_of(joint))
    found: dict[str, str] = {}
    for load, derivative in zip(compress(loads, learned), derivatives, strict=True):
        found[load] = builder.emit("add", "f", found.get(load, _NOTHING), derivative)
    found = {load: each for load, each in found.items() if each != _NOTHING}
    return _traced(builder, value, slope, tuple(found.items()))


def _traced(
    builder: Builder, value: str, slope: str, learned: tuple[tuple[str, str], ...] = ()
) -> Traced:
    """The program of what was built, and what a call passes for it."""
    program = Program(
        captures=tuple(map(capture_of, builder.captures)),
        numbers=tuple(type_ for type_, _ in builder.numbers),
        operations=tuple(builder.operations),
        value=value,
        slope=slope,
        learned=learned,
    )
    numbers = tuple(number for _, number in builder.numbers)
    read = tuple(map(as_read, builder.captures))
    sources = tuple(builder.captures)
    origins = tuple(builder.origins)
    return Traced(program, read, numbers, sources, origins, merged=builder.merged)
