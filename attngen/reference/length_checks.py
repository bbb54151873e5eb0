"""Whether the lengths of a call are said once, where they are needed, and fit its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..call.table import AttentionCall, Side, named
from ..spec.masks import masks_of
from .entry_checks import entry_violations
from .operands import Operands
from .sequences import Span
from .sizes import agree, agree_all
from .wording import shape_of

INTEGERS = (torch.int32, torch.int64)  # of lengths, offsets and pages; kernels take the first


def length_violations(
    call: AttentionCall, operands: Operands, integers: Sequence[torch.dtype] = INTEGERS
) -> Iterator[str]:
    """Violations that shapes and dtypes of the length arguments show. integers: the dtypes that
    they may have."""
    yield from _side_violations(call, operands, "q", integers)
    yield from _side_violations(call, operands, "kv", integers)
    yield from _paging_violations(call, operands, integers)
    lengths = call.lengths("kv", operands.layout)
    given = lengths.cu_seqlens is not None or lengths.seqused is not None
    padding = isinstance(call.mask, str) and masks_of(call.mask).padding
    if padding and not given:
        yield (
            f"mask={call.mask!r} needs the lengths of k and v; got none. Pass seqused_kv "
            f"int32 [b], or cu_seqlens_kv int32 [b+1]."
        )


def value_violations(
    call: AttentionCall, operands: Operands, queries: list[Span], keys: list[Span]
) -> Iterator[str]:
    """Violations that the lengths themselves show, once they are on the host."""
    wrong = [*entry_violations(call, operands)]
    yield from wrong
    if wrong:
        return  # of what they say no more can be told
    yield from _longest_violations("q", queries, call.max_seqlen_q)
    yield from _longest_violations("kv", keys, call.max_seqlen_kv)
    if operands.layout.one_length and queries != keys:
        yield (
            f"layout={operands.layout.name!r} has one length for q, k and v; got different "
            f"ones. Leave the lengths of kv out."
        )
    yield from _extent_violations(call, operands, queries, keys)


def _side_violations(
    call: AttentionCall, operands: Operands, side: Side, integers: Sequence[torch.dtype]
) -> Iterator[str]:
    """Dtypes, shapes and presence of cu_seqlens, its padded form and seqused of Q or K/V."""
    layout, batch = operands.layout, operands.batch
    lengths = call.lengths(side, layout)
    fmt = layout.q_format if side == "q" else layout.kv_format
    expected = {
        f"cu_seqlens_{side}": (lengths.cu_seqlens, "[b+1]", batch + 1),
        f"cu_seqlens_{side}_padded": (lengths.padded, "[b+1]", batch + 1),
        f"seqused_{side}": (lengths.seqused, "[b]", batch),
    }
    for name, (tensor, shape, count) in expected.items():
        if tensor is None:
            continue
        fits = agree_all(tensor.shape, (count,))
        if not fits or tensor.dtype not in integers:
            advice = "Pass one entry a sequence, and one more in cu_seqlens."
            yield (
                f"{name} needs int32 {shape} with b={batch}; got {shape_of(tensor)}. "
                f"{'Cast it to torch.int32.' if fits else advice}"
            )
    if fmt == "thd" and lengths.cu_seqlens is None:
        yield (
            f"layout={layout.name!r} needs cu_seqlens_{side} int32 [b+1]; got None. "
            f"Pass the cumulative lengths of the sequences."
        )
    if fmt == "thd" and lengths.seqused is not None:
        yield (
            f"layout={layout.name!r} takes its lengths from cu_seqlens_{side}; got "
            f"seqused_{side} too. Leave it out; cu_seqlens_{side}_padded says where gaps are."
        )
    if fmt != "thd" and lengths.padded is not None:
        yield (
            f"cu_seqlens_{side}_padded belongs to thd; {side} of layout={layout.name!r} is "
            f"{fmt}. Leave it out."
        )
    if fmt != "thd" and lengths.cu_seqlens is not None and lengths.seqused is not None:
        yield f"cu_seqlens_{side} and seqused_{side} both say the lengths. Pass one of them."


def _paging_violations(
    call: AttentionCall, operands: Operands, integers: Sequence[torch.dtype]
) -> Iterator[str]:
    """Paged K/V have tables and seqused_kv and no gradient; other layouts have no table."""
    name, tables = operands.layout.name, call.page_tables
    if not operands.layout.paged:
        if tables:
            yield (
                f"page_table belongs to paged layouts; got it with layout={name!r}. "
                f"Use layout='paged_kv_…', or leave it out."
            )
        return
    fit = len(tables) == 2 and all(
        t.ndim == 2 and agree(t.shape[0], operands.batch) for t in tables
    )
    if not fit or any(t.dtype not in integers for t in tables):
        got = ", ".join(map(shape_of, dict.fromkeys(tables))) or "None"
        yield (
            f"layout={name!r} needs page_table int32 [b={operands.batch}, max_pages], one or "
            f"(for K, for V); got {got}. {'Cast it to torch.int32.' if fit else 'Pass it.'}"
        )
    if call.seqused_kv is None or call.cu_seqlens_kv is not None:
        yield (
            f"layout={name!r} needs the lengths of k and v in seqused_kv int32 [b], and in no "
            f"other argument. Pass it, and leave cu_seqlens_kv out."
        )
    given = [x for x in named(call).values() if isinstance(x, Tensor) and x.requires_grad]
    if given and torch.is_grad_enabled():
        yield (
            f"layout={name!r} is inference only; got tensors that require a gradient. "
            f"Call it under torch.no_grad()."
        )


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
        if tensor is None:
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
