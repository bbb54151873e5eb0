"""Operands and numbers of the torch operations beside q, k and v, and their schemas.

A feature that reads another tensor adds a row to `call/table.py`, one with a number a field to
`Arguments`, too; the operations, their fakes and their gradients follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from ...call.numbers import Arguments
from ...call.table import INPUTS, OPTIONAL, WantedGradients
from ...errors import SpecError

# q, k, v and then OPTIONAL; k and v are None where the layout packs them into q or k.
Operands = Sequence[Tensor | None]


class CallForm(NamedTuple):
    """A call but for its tensors: its arguments, and which of `INPUTS` it has."""

    arguments: Arguments
    places: tuple[int, ...]

    def by_name(self, present: Sequence[Tensor]) -> dict[str, Tensor | None]:
        """All operands by their names. present: those that the call has."""
        names = (INPUTS[place] for place in self.places)
        return dict.fromkeys(INPUTS) | dict(zip(names, present, strict=True))


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch has under a name. Raises: SpecError where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SpecError(f"out_dtype={name!r} is no dtype of torch; pass a name such as 'float32'")
    return found


def places_of(operands: Operands) -> tuple[int, ...]:
    """Places of the operands that there are."""
    return tuple([place for place, x in enumerate(operands) if x is not None])


_TYPES = {
    str: "str",
    int: "int",
    bool: "bool",
    float: "float",
    float | None: "float?",
    str | None: "str?",
}


def schema() -> str:
    """The end of the operations' schemas, behind q, k and v; everything has a default."""
    tensors = [f"Tensor? {name}=None" for name in OPTIONAL]
    types = get_type_hints(Arguments)
    return ", ".join([*tensors, *(_declaration(name, types[name]) for name in Arguments._fields)])


def _declaration(name: str, type_: Any) -> str:
    default = Arguments._field_defaults[name]
    shown = f'"{default}"' if isinstance(default, str) else default
    return f"{_TYPES[type_]} {name}={shown}"


def split(rest: Sequence[Any]) -> tuple[tuple[Tensor | None, ...], Arguments]:
    """The optional tensors, and the arguments, of what an operation got after q, k and v.

    The dispatcher leaves out what stands at the end and equals its default.
    """
    count = len(OPTIONAL)
    tensors = (*rest[:count], *(None for _ in range(count - len(rest))))
    return tensors, Arguments(*rest[count : count + len(Arguments._fields)])


def wanted_of(rest: Sequence[Any], one_tensor: bool = False) -> WantedGradients:
    """Gradients that a call of the backward asks for, by its last arguments.

    one_tensor: whether Q, K and V are one, which has one gradient.
    """
    wanted = WantedGradients(*rest[len(OPTIONAL) + len(Arguments._fields) :])
    both = wanted.dq or wanted.dkv
    return wanted._replace(dq=both, dkv=both) if one_tensor else wanted


def wanted_and_mixed(
    rest: Sequence[Any], one_tensor: bool = False
) -> tuple[WantedGradients, bool]:
    """Gradients that are wanted, and whether products of weights and of dS have 16 bits, in the
    schemas of backwards of FP8 operands."""
    end = len(OPTIONAL) + len(Arguments._fields) + len(WantedGradients._fields)
    return wanted_of(rest[:end], one_tensor), bool(rest[end:] and rest[end])
