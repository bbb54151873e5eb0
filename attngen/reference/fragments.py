"""Masks and scores of fragments, by the definitions in Python that their headers carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..call import fragments as call_fragments
from ..fragments.definition import FUNCTIONS
from ..fragments.header import Fragment

_GLOBALS: dict[str, Any] = {name: getattr(torch, name) for name in FUNCTIONS}
_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}


def definition_of(fragment: Fragment) -> Callable[..., Any]:
    """The function of a fragment's definition, over tensors of torch.

    Raises: SpecError where its header has none.
    """
    key = (fragment.reference, tuple(operand.name for operand in fragment.operands), fragment.axis)
    if key not in _functions:
        _functions[key] = call_fragments.definition_of(fragment, _GLOBALS)
    return _functions[key]


def positions(
    s_q: int, s_kv: int, delta: int, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Positions of one sequence as definitions name them: i [s_q, 1], j [1, s_kv], and numbers."""
    i = torch.arange(s_q, device=device)[:, None]
    j = torch.arange(s_kv, device=device)[None, :]
    return {"i": i, "j": j, "delta": delta, "q_len": s_q, "kv_len": s_kv}


def operands_of_sequence(
    given: Mapping[str, Any], fragment: Fragment, b: int
) -> dict[str, Any]:
    """Values that a fragment reads for sequence b, of those that a call gives by their names:
    numbers, and of tensors those of the sequence, as they broadcast to [h_q, s_q, s_kv]."""
    found: dict[str, Any] = {}
    for operand in fragment.operands:
        value = given[operand.name]
        if operand.domain == "sequence" and isinstance(value, Tensor):
            value = value[b]
        elif isinstance(value, Tensor):
            value = (value[b] if value.ndim == 2 else value)[:, None, None]
        found[operand.name] = value
    return found


def seen_by(fragment: Fragment, operands: Mapping[str, Any], known: Mapping[str, Any]) -> Tensor:
    """The pairs that a mask shows, bool [s_q, s_kv]. known: as `positions` gives it.

    Raises: SpecError where the mask has no definition, but for tensors without values.
    """
    shape = (known["q_len"], known["kv_len"])
    if fragment.reference is None and known["i"].is_meta:
        return torch.ones(shape, dtype=torch.bool, device="meta")
    seen: Tensor = definition_of(fragment)(**known, **operands)
    return seen.expand(shape)


def scored_by(
    fragment: Fragment, operands: Mapping[str, Any], known: Mapping[str, Any], score: Tensor
) -> Tensor:
    """Scores [h_q, s_q, s_kv] that a fragment makes of scaled ones. known: as of `positions`.

    Raises: as `seen_by`.
    """
    if fragment.reference is None and score.is_meta:
        return score
    made: Tensor = definition_of(fragment)(score=score, **known, **operands)
    return made
