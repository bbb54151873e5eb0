"""Positions in tensors: numbers of each sequence become the operand `places`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.position_checks import OUTSIDE
from ..call.positions import PLACES, Positions, is_within
from ..call.table import AttentionCall
from ..errors import SpecError
from ..spec import layouts

_HEAD = Positions._fields.index("head")
_MOST = len(Positions._fields)


def with_places(call: AttentionCall) -> AttentionCall:
    """The call with what tensors among its positions say of each sequence as places; itself where
    there are none.

    Raises: SpecError where these are no positions, or stand beside places.
    """
    given = call.positions
    if not (isinstance(given, (tuple, list)) and any([isinstance(x, Tensor) for x in given])):
        return call
    batch = _sequences(call)
    if reasons := _violations(call, given, batch):
        raise SpecError(reasons)
    query, key, *rest = given
    diagonal = rest[0] if rest else query - key
    head = rest[1] if len(rest) > 1 else 0
    first = rest[2] if len(rest) > 2 else 0
    own: Any = torch.arange(batch, dtype=torch.int32, device=call.q.device)
    sequence = first if isinstance(first, Tensor) else own + first
    places = own.new_empty(batch, PLACES)
    for column, x in zip(places.unbind(1), (query, key, diagonal, sequence), strict=True):
        column.copy_(x) if isinstance(x, Tensor) else column.fill_(x)
    return replace(call, positions=(0, 0, 0, head, 0), places=places)


def _sequences(call: AttentionCall) -> int:
    """How many sequences a call has. Raises: SpecError where it has no layout."""
    axes = layouts.parse(call.layout).q_format
    if axes != "thd":
        return layouts.size(call.q.shape, axes, "b")
    ends = call.lengths("q", layouts.parse(call.layout)).cu_seqlens
    return 0 if ends is None else ends.numel() - 1


def _violations(call: AttentionCall, given: Any, batch: int) -> list[str]:
    """Faults of positions among which is a tensor."""
    if call.places is not None:
        return ["positions of each sequence beside places: pass one of them"]
    if not 2 <= len(given) <= _MOST:
        return [f"positions has two to {_MOST} numbers; got {len(given)}"]
    reasons = []
    for place, (name, x) in enumerate(zip(Positions._fields, given, strict=False)):
        fits = isinstance(x, int) and not isinstance(x, bool)
        if fits and not is_within(name, x):
            reasons.append(f"positions: {name}={x} {OUTSIDE}")
        if isinstance(x, Tensor) and x.device != call.q.device:
            reasons.append(
                f"positions: {name} needs q's device, {call.q.device}; got {x.device}. Move it "
                "there."
            )
        if isinstance(x, Tensor):
            integer = x.dtype in (torch.int32, torch.int64)
            fits = integer and tuple(x.shape) == (batch,) and place != _HEAD
        if not fits:
            wanted = "an int" if place == _HEAD else f"an int, or int32 [b={batch}]"
            found = f"{x.dtype} {[*x.shape]}" if isinstance(x, Tensor) else repr(x)
            reasons.append(f"positions: {name} needs {wanted}; got {found}")
    return reasons
