"""Nested tensors: jagged ones stand for packed tokens and the lengths of their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.table import AttentionCall, given_by, named
from ...errors import SpecError
from ...spec.layouts import Layout, parse

RAGGED = 1  # axis j of a nested [b, j, h, d], whose values are [t, h, d]


@dataclass(frozen=True)
class Ragged:
    """Where the sequences of nested operands lie: `offsets` [b+1] of their first tokens, and
    `lengths` [b] where these leave holes."""

    offsets: Tensor
    lengths: Tensor | None

    def arguments(self, side: str) -> dict[str, Tensor]:
        """The lengths of one side of a call, `q` or `kv`, without waiting for them."""
        offsets = self.offsets.to(torch.int32)
        if self.lengths is None:
            return {f"cu_seqlens_{side}": offsets}
        ends = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))
        return {f"cu_seqlens_{side}": ends.to(torch.int32), f"cu_seqlens_{side}_padded": offsets}

    @property
    def keeps_lengths(self) -> bool:
        """Whether calls get the same tensors each time."""
        return self.lengths is None and self.offsets.dtype == torch.int32

    def same_as(self, other: Ragged) -> bool:
        """Whether both are the same tensors; their values stay on the device."""
        return self.offsets is other.offsets and self.lengths is other.lengths


def attend(attention: Callable[..., Any], given: AttentionCall) -> Any:
    """`attention` of a call with nested operands: it gets their values and lengths, and its output
    becomes a nested tensor with the offsets of q.

    Raises: SpecError where operands cannot be what the layout's tokens are.
    """
    call = named(given)
    layout = parse(call["layout"])
    carriers = {name: x for name in "qkv" if (x := call[name]) is not None}
    if reasons := [*_violations(layout, carriers, call)]:
        raise SpecError(reasons)
    nested = {name: x for name, x in carriers.items() if x.is_nested}
    found = {name: Ragged(x.offsets(), x.lengths()) for name, x in nested.items()}
    if "k" in found and "v" in found and not found["k"].same_as(found["v"]):
        raise SpecError(
            "k and v must have the same offsets, as the same tensor; make v with "
            "torch.nested.nested_tensor_from_jagged(values, k.offsets(), k.lengths())"
        )
    if call["schedule"] is not None and not all(x.keeps_lengths for x in found.values()):
        raise SpecError(
            "schedule: these nested tensors make the lengths of a call anew each time; give them "
            "int32 offsets and no holes, or leave it out"
        )
    lengths: dict[str, Tensor] = {}
    for side, name in (("q", "q"), ("kv", "k")):
        if name in found:
            lengths |= found[name].arguments(side)
    values = {name: x.values() for name, x in nested.items()}
    result = attention(**{**given_by(given), **values, **lengths})
    if "q" not in found:
        return result
    out, *others = result if isinstance(result, tuple) else (result,)
    offsets, holes = found["q"].offsets, found["q"].lengths
    out = torch.nested.nested_tensor_from_jagged(out, offsets, holes, jagged_dim=RAGGED)
    return (out, *others) if isinstance(result, tuple) else out


def _violations(
    layout: Layout, carriers: Mapping[str, Tensor], call: Mapping[str, Any]
) -> Iterator[str]:
    for name, x in carriers.items():
        side = "q" if name == "q" else "kv"
        tokens = (layout.q_format if side == "q" else layout.kv_format) == "thd"
        if x.is_nested and not tokens:
            yield (
                f"{name} is nested, which is packed tokens; layout={layout.name!r} has none there. "
                "Pass layout='thd'."
            )
        elif x.is_nested and (x.layout != torch.jagged or getattr(x, "_ragged_idx", 0) != RAGGED):
            yield f"{name} is nested: it needs layout=torch.jagged, ragged in axis {RAGGED}"
        elif tokens and not x.is_nested and name != "q":
            yield (
                f"{name} is not nested, others are; pass all packed tokens nested, or all as "
                "values() with cu_seqlens"
            )
        elif tokens and not x.is_nested and layout.kv_format == "thd":
            yield "q is not nested, k is; nest both, or pass values() with cu_seqlens"
    names = (f"cu_seqlens_{side}{kind}" for side in ("q", "kv") for kind in ("", "_padded"))
    yield from (
        f"{name} is what nested tensors say themselves; leave it out"
        for name in names
        if call[name] is not None
    )
