"""Where each sequence of an operand lies, whatever the layout: lengths, offsets, pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call.table import AttentionCall, Lengths
from ..spec.layouts import Format
from .core import accumulation_dtype
from .operands import Operands


@dataclass(frozen=True)
class Span:
    """Actual positions of one sequence: how many, and its first token where tokens are packed."""

    length: int
    start: int = 0


def q_spans(call: AttentionCall, operands: Operands) -> list[Span]:
    """The span of every sequence of Q; reads the lengths from their device."""
    lengths = call.lengths("q", operands.layout)
    return _spans(operands.batch, operands.dense_s_q, lengths)


def kv_spans(call: AttentionCall, operands: Operands) -> list[Span]:
    """The span of every sequence of K and V; reads the lengths from their device."""
    lengths = call.lengths("kv", operands.layout)
    return _spans(operands.batch, operands.dense_s_kv, lengths)


def sequence_view(x: Tensor, fmt: Format, b: int, span: Span) -> Tensor:
    """Sequence b of an operand as a view [h, length, d] of its actual positions."""
    if fmt == "thd":
        return x[span.start : span.start + span.length].transpose(0, 1)
    if fmt == "sbhd":
        return x[: span.length, b].transpose(0, 1)
    if fmt == "bshd":
        return x[b, : span.length].transpose(0, 1)
    return x[b, :, : span.length]


def kv_sequences(
    call: AttentionCall, operands: Operands, b: int, span: Span
) -> tuple[Tensor, Tensor]:
    """K [h_kv, length, d] and V [h_kv, length, d_v] of sequence b: views, or pages collected."""
    fmt = operands.layout.kv_format
    if not operands.layout.paged:
        k = sequence_view(operands.k, fmt, b, span)
        return k, sequence_view(operands.v, fmt, b, span)
    k_table, v_table = call.page_tables
    k = _collect_pages(operands.k, fmt, k_table[b], span.length)
    return k, _collect_pages(operands.v, fmt, v_table[b], span.length)


def _collect_pages(pages: Tensor, fmt: Format, table: Tensor, length: int) -> Tensor:
    """The first positions of a paged sequence, [h, length, d]; reads no page beyond them.

    pages: [pages, page_size, h, d] (bshd) or [page_size, pages, h, d] (sbhd).
    table: int32 [max_pages], the pages of this sequence in order.
    """
    if fmt == "sbhd":
        pages = pages.transpose(0, 1)
    used = table[: -(-length // pages.shape[1])].long()
    return pages[used].flatten(0, 1)[:length].transpose(0, 1)


def join_outputs(operands: Operands, spans: Sequence[Span], parts: Sequence[Tensor]) -> Tensor:
    """O of outputs [h, length, d_v] of each sequence: Q's format, with zeros beside them."""
    fmt = operands.layout.q_format
    if not parts:
        shape = (*operands.q.shape[:-1], operands.v.shape[-1])
        return operands.q.new_zeros(shape, dtype=accumulation_dtype(operands.q.dtype))
    joined = _join(operands, spans, parts, 0.0)
    if fmt == "thd":
        return joined.transpose(0, 1).contiguous()
    return joined.permute(["bhsd".index(axis) for axis in fmt]).contiguous()


def join_lse(operands: Operands, spans: Sequence[Span], parts: Sequence[Tensor]) -> Tensor:
    """The LSE of those [h, length] of each sequence: [b, h_q, s_q], of packed tokens [h_q, t], with
    −∞ beside them."""
    if parts:
        return _join(operands, spans, parts, float("-inf"))
    q, s_q = operands.q, operands.dense_s_q
    sizes = [operands.h_q, q.shape[0]] if s_q is None else [0, operands.h_q, s_q]
    return q.new_full(sizes, float("-inf"), dtype=accumulation_dtype(q.dtype))


def _join(
    operands: Operands, spans: Sequence[Span], parts: Sequence[Tensor], filling: float
) -> Tensor:
    """Parts [h, length, …] of sequences, in one tensor: [b, h, s_q, …], or [h, t, …] where tokens
    are packed. Nothing is written in place: under `torch.vmap` parts may be mapped over that no
    operand is."""
    like = parts[0]

    def gap(length: int) -> Tensor:
        return like.new_full((like.shape[0], length, *like.shape[2:]), filling)

    room = operands.dense_s_q
    if room is not None:
        pairs = zip(parts, spans, strict=True)
        padded = (
            part if span.length == room else torch.cat([part, gap(room - span.length)], 1)
            for part, span in pairs
        )
        return torch.stack([*padded])
    pieces, end = [], 0
    for part, span in zip(parts, spans, strict=True):
        # One without positions lies anywhere; it keeps what comes of them differentiable.
        pieces += [gap(span.start - end), part] if span.length else [part]
        end = span.start + span.length if span.length else end
    return torch.cat([*pieces, gap(operands.q.shape[0] - end)], 1)


def _spans(batch: int, dense_length: int | None, lengths: Lengths) -> list[Span]:
    """Spans from whatever says the lengths; a dense operand without any is full."""
    if lengths.seqused is not None:
        return [Span(length) for length in lengths.seqused.tolist()]
    if lengths.cu_seqlens is None:
        return [Span(dense_length or 0)] * batch
    ends = lengths.cu_seqlens.tolist()
    starts = ends if lengths.padded is None else lengths.padded.tolist()
    return [
        Span(ends[b + 1] - ends[b], start=0 if dense_length is not None else starts[b])
        for b in range(batch)
    ]
