"""Places of rows: the sequence of each query and key, and where it lies in it.

The definition computes dense operands as a batch of sequences, and packed ones as one batch of all
their tokens, of which a query sees those of its own sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from ...spec.layouts import Format, Layout


@dataclass(frozen=True)
class Rows:
    """Rows of Q, or of K and V.

    sequence, position, used: int32, int32 and bool, broadcasts of [n, rows], n the batch or, of
    packed tokens, 1. lengths: int32 [b], the positions in use of each sequence.
    """

    sequence: Array
    position: Array
    used: Array
    lengths: Array


@dataclass(frozen=True)
class Carriers:
    """Q, K and V as [n, rows, heads, dim], and their rows."""

    q: Array
    k: Array
    v: Array
    of_q: Rows
    of_kv: Rows

    @property
    def packed(self) -> bool:
        """Whether rows are tokens of all sequences."""
        return bool(self.of_q.sequence.shape[0] == 1 != self.of_q.lengths.shape[0])

    @property
    def together(self) -> Array:
        """Pairs of one sequence that are in use, bool, a broadcast of [n, rows of q, rows of k]."""
        one, other = self.of_q, self.of_kv
        used = one.used[:, :, None] & other.used[:, None, :]
        return used & (one.sequence[:, :, None] == other.sequence[:, None, :])

    def of_row(self, values: Array) -> Array:
        """Values [b] of the sequences of all queries, [n, rows, 1]."""
        return values[self.of_q.sequence][:, :, None]


def placed(
    layout: Layout, q: Array, k: Array, v: Array, lengths: Mapping[str, Array | None]
) -> Carriers:
    """The carriers of a call, whose q, k and v are unpacked. lengths: by the operations' names,
    with tables of pages among them."""
    q, of_q = _side(q, layout.q_format, "q", lengths)
    if layout.paged:
        tables = (lengths["page_table_k"], lengths["page_table_v"])
        k, v = (
            _pages(x, layout.kv_format, table)  # type: ignore[arg-type]  # checked with the call
            for x, table in zip((k, v), tables, strict=True)
        )
        axes: Format = "bshd"
    else:
        axes = layout.kv_format
    k, of_kv = _side(k, axes, "kv", lengths)
    v, _ = _side(v, axes, "kv", lengths)
    if layout.q_format == "thd" and axes != "thd":
        k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (k, v))
        of_kv = _joined(of_kv)
    # What belongs to no sequence may hold anything, and must not even be multiplied by 0.
    k, v = (jnp.where(of_kv.used[:, :, None, None], x, jnp.zeros_like(x)) for x in (k, v))
    q = jnp.where(of_q.used[:, :, None, None], q, jnp.zeros_like(q))
    return Carriers(q, k, v, of_q, of_kv)


def as_rows(x: Array, axes: Format) -> Array:
    """A tensor in a format as [n, rows, heads, dim]; what `returned` undoes."""
    return x[None] if axes == "thd" else x.transpose([axes.index(axis) for axis in "bshd"])


def returned(x: Array, axes: Format) -> Array:
    """An output [n, rows, heads, dim] in Q's format."""
    if axes == "thd":
        return x.reshape(x.shape[1:])
    return x.transpose(["bshd".index(axis) for axis in axes])


def _side(
    x: Array, axes: Format, side: str, lengths: Mapping[str, Array | None]
) -> tuple[Array, Rows]:
    if axes == "thd":
        ends = lengths[f"cu_seqlens_{side}"]
        assert ends is not None  # checked with the call
        starts = lengths[f"cu_seqlens_{side}_padded"]
        return x[None], _packed_rows(ends, ends if starts is None else starts, x.shape[0])
    x = x.transpose([axes.index(axis) for axis in "bshd"])
    batch, rows, *_ = x.shape
    used = lengths[f"seqused_{side}"]
    sizes = jnp.full(batch, rows, jnp.int32) if used is None else used
    position = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    sequence = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, rows))
    return x, Rows(sequence, position, position < sizes[:, None], sizes)


def used_rows(
    axes: Sequence[str], side: str, shape: Sequence[int], lengths: Mapping[str, Array | None]
) -> Array | None:
    """Which rows of an array of these axes belong to a sequence, bool, a broadcast of it; None
    where all do. side: q or kv, by whose lengths."""
    ends, used = lengths[f"cu_seqlens_{side}"], lengths[f"seqused_{side}"]
    if "t" in axes and ends is not None:
        starts, place = lengths[f"cu_seqlens_{side}_padded"], axes.index("t")
        rows = _packed_rows(ends, ends if starts is None else starts, shape[place]).used
        return rows.reshape([-1 if axis == "t" else 1 for axis in axes])
    if used is None:
        return None
    batch, place = used.shape[0], axes.index("s")
    position = jnp.arange(shape[place], dtype=jnp.int32)
    sizes = {"b": batch, "s": shape[place]}
    inside = position < used[:, None]
    if axes.index("b") > place:
        inside = inside.T
    return inside.reshape([sizes.get(axis, 1) for axis in axes])


def _packed_rows(ends: Array, offsets: Array, tokens: int) -> Rows:
    """Rows of packed tokens. ends: cumulative lengths; offsets: where sequences begin."""
    sizes, starts = jnp.diff(ends), offsets[:-1]
    token = jnp.arange(tokens, dtype=jnp.int32)
    inside = (token >= starts[:, None]) & (token < (starts + sizes)[:, None])
    if not sizes.shape[0]:
        nothing = jnp.zeros((1, tokens), jnp.int32)
        return Rows(nothing, nothing, nothing > 0, sizes)
    sequence = jnp.argmax(inside, axis=0).astype(jnp.int32)
    return Rows(sequence[None], (token - starts[sequence])[None], inside.any(0)[None], sizes)


def _pages(pages: Array, axes: Format, table: Array) -> Array:
    """The pages of each sequence in their order, [b, positions, h, d]; entries behind its last page
    may be anything."""
    pages = pages.transpose([axes.index(axis) for axis in "bshd"])
    found = jnp.take(pages, table, axis=0, mode="clip")
    return found.reshape(table.shape[0], -1, *pages.shape[2:])


def _joined(rows: Rows) -> Rows:
    """Rows of a batch as those of one batch of all."""
    sequence, position, used = (
        x.reshape(1, -1) for x in (rows.sequence, rows.position, rows.used)
    )
    return Rows(sequence, position, used, rows.lengths)
