"""Whether the lengths of a call are said once, where they are needed, and fit its tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call import length_checks
from ..call.position_checks import place_violations
from ..call.table import AttentionCall, Side, named
from .entry_checks import entry_violations
from .operands import Operands
from .sequences import Span
from .sizes import agree


def length_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Violations that shapes and dtypes of the length arguments show; pages have no gradient."""
    layout = operands.layout
    yield from length_checks.length_violations(call, layout, operands.batch, agree=agree)
    given = [x for x in named(call).values() if isinstance(x, Tensor) and x.requires_grad]
    if layout.paged and given and torch.is_grad_enabled():
        yield (
            f"layout={layout.name!r} is inference only; got tensors that require a gradient. "
            f"Call it under torch.no_grad()."
        )


def value_violations(
    call: AttentionCall, operands: Operands, queries: list[Span], keys: list[Span]
) -> Iterator[str]:
    """Violations that the lengths themselves show, once they are on the host."""
    wrong = [*entry_violations(call, operands)]
    yield from wrong
    if wrong:
        return  # of what they say no more can be told
    if call.places is not None:
        yield from place_violations(call.places.tolist())
    yield from _longest_violations("q", queries, call.max_seqlen_q)
    yield from _longest_violations("kv", keys, call.max_seqlen_kv)
    if operands.layout.one_length and queries != keys:
        yield (
            f"layout={operands.layout.name!r} has one length for q, k and v; got different "
            f"ones. Leave the lengths of kv out."
        )
    yield from _extent_violations(call, operands, queries, keys)


def _longest_violations(
    side: Side, spans: list[Span], max_seqlen: int | Tensor | None
) -> Iterator[str]:
    """No length may be above the maximum that the call states."""
    lengths = [span.length for span in spans]
    if max_seqlen is not None and max([0, *lengths]) > max_seqlen:
        yield (
            f"max_seqlen_{side}={max_seqlen} must be no less than any length; got lengths "
            f"{lengths}. Pass at least {max(lengths)}."
        )


def _extent_violations(
    call: AttentionCall, operands: Operands, queries: list[Span], keys: list[Span]
) -> Iterator[str]:
    """Bias, masks and block mask must reach the longest sequences; a size of 1 broadcasts."""
    longest = [max([0, *(span.length for span in spans)]) for spans in (queries, keys)]
    for name, tensor in (("bias", call.bias), ("attn_mask", call.attn_mask)):
        if tensor is None or tensor.dtype == torch.int32:  # a mask of bits, which has its own
            continue
        extent = ((1, 1) + tuple(tensor.shape))[-2:]
        if any(1 < have < need for have, need in zip(extent, longest, strict=True)):
            yield (
                f"{name} needs at least [{longest[0]}, {longest[1]}] positions or 1; got "
                f"{list(tensor.shape)}. Extend it to the longest sequence."
            )
    if call.block_mask is None:
        return
    if any(a < b for a, b in zip(call.block_mask.shape[-2:], longest, strict=True)):
        yield (
            f"block_mask needs at least [{longest[0]}, {longest[1]}] positions; got "
            f"{list(call.block_mask.shape)}. Make it anew for the longest sequence."
        )
