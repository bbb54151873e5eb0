"""Where each sequence of an operand lies, whatever the layout: lengths, offsets, pages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, dtype

from ..layouts import Format, size
from .call import AttentionCall, Lengths, Operands


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


def new_output(operands: Operands, dtype: dtype) -> Tensor:
    """Zeros in the shape of O: Q's format, with V's head dim."""
    shape = (*operands.q.shape[:-1], operands.v.shape[-1])
    return operands.q.new_zeros(shape, dtype=dtype)


def new_lse(operands: Operands, dtype: dtype) -> Tensor:
    """−∞ in the shape of the LSE, [b, h_q, s_q], or [h_q, total_q] where Q is `thd`."""
    q, s_q = operands.q, operands.dense_s_q
    if s_q is None:
        shape = [operands.h_q, size(q.shape, "thd", "t")]
    else:
        shape = [operands.batch, operands.h_q, s_q]
    return q.new_full(shape, float("-inf"), dtype=dtype)


def lse_view(lse: Tensor, b: int, span: Span) -> Tensor:
    """Sequence b of an LSE as a view [h_q, length] of its actual positions."""
    if lse.ndim == 2:
        return lse[:, span.start : span.start + span.length]
    return lse[b, :, : span.length]


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
