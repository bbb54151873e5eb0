"""Sequences in rows, as TransformerEngine's JAX package describes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...errors import SpecError

Pair = tuple[Array, Array]


class Packed(NamedTuple):
    """Segments of rows as the layout `thd` has them: cumulative lengths, and where they begin."""

    ends: Array
    starts: Array


@jax.tree_util.register_pytree_node_class
class SequenceDescriptor:
    """Lengths of sequences, of queries and of keys, in one of several forms; a pytree.

    `from_seqlens`: a sequence a row. `from_seqlens_and_offsets`: several segments a row, with their
    lengths and where they begin. `from_segment_ids_and_pos`: the number of each token's segment, 1
    the first, 0 of padding, and its position in it.
    """

    def __init__(
        self,
        seqlens: Pair | None = None,
        seq_offsets: Pair | None = None,
        segment_ids: Pair | None = None,
        segment_pos: Pair | None = None,
    ) -> None:
        absent = (jnp.zeros(0), jnp.zeros(0))
        self.seqlens = absent if seqlens is None else seqlens
        self.seq_offsets = absent if seq_offsets is None else seq_offsets
        self.segment_ids = absent if segment_ids is None else segment_ids
        self.segment_pos = absent if segment_pos is None else segment_pos

    def tree_flatten(self) -> tuple[tuple[Pair, ...], None]:
        """Its arrays."""
        return (self.seqlens, self.seq_offsets, self.segment_ids, self.segment_pos), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Pair, ...]) -> SequenceDescriptor:
        """The descriptor of these arrays."""
        return cls(*children)

    @classmethod
    def from_seqlens(cls, seqlens: Array | Pair) -> SequenceDescriptor:
        """Sequences of lengths int32 [b], of queries and of keys, or of both alike."""
        return cls(seqlens=_pair(seqlens))

    @classmethod
    def from_seqlens_and_offsets(
        cls, seqlens: Array | Pair, seq_offsets: Array | Pair
    ) -> SequenceDescriptor:
        """Segments of lengths int32 [b, n] that begin at offsets int32 [b, n + 1] of their rows;
        −1 where there is none."""
        return cls(seqlens=_pair(seqlens), seq_offsets=_pair(seq_offsets))

    @classmethod
    def from_segment_ids_and_pos(
        cls, segment_ids: Array | Pair, segment_pos: Array | Pair | None = None
    ) -> SequenceDescriptor:
        """Segments by the number of each token's, int32 [b, s], and its position, which counts from
        0. Raises: SpecError, a ValueError, without positions."""
        if segment_pos is None:
            raise SpecError("segment_pos is needed: the position of each token in its segment")
        return cls(segment_ids=_pair(segment_ids), segment_pos=_pair(segment_pos))

    @property
    def has_ids(self) -> bool:
        """Whether it has numbers of segments."""
        return any(x.size for x in self.segment_ids)

    def lengths(self) -> Pair:
        """Lengths of sequences that are a row each, int32 [b]."""
        if not self.has_ids:
            return self.seqlens
        q, kv = ((ids > 0).sum(-1).astype(jnp.int32) for ids in self.segment_ids)
        return q, kv

    def packed(self, rows: tuple[int, int], segments: int) -> tuple[Packed, Packed]:
        """Segments of queries and of keys. rows: tokens of a row of each; segments: the most of a
        row.

        Raises: SpecError where it has neither lengths with offsets nor numbers of segments.
        """
        if self.has_ids:
            found = [_of_ids(ids, segments) for ids in self.segment_ids]
        elif any(x.size for x in self.seq_offsets):
            found = [*zip(self.seqlens, self.seq_offsets, strict=True)]
        else:
            raise SpecError(
                "segments of THD need from_seqlens_and_offsets or from_segment_ids_and_pos"
            )
        q, kv = (_joined(*each, size) for each, size in zip(found, rows, strict=True))
        return q, kv

    def shown_over(
        self, axis: str, segments: int, window: tuple[int, int], diagonal: tuple[bool, bool]
    ) -> Array:
        """Keys of all devices along an axis of a mesh that each of the device's queries sees, bool
        [b, s_q / n, s_kv], keys of one device behind those of another.

        segments: the most of a row; window: keys before and behind a query's, −1 unbounded;
        diagonal: whether keys behind it are hidden, and whether it ends with its segment's keys.
        """
        (ids, of_keys), (positions, key_positions) = self.segment_ids, self.segment_pos
        causal, aligned = diagonal
        keys = jax.lax.all_gather(of_keys, axis, axis=1, tiled=True)
        j = jax.lax.all_gather(key_positions, axis, axis=1, tiled=True)[:, None, :]
        i = positions
        if aligned:
            (lengths, _), (key_lengths, _) = (_of_ids(x, segments) for x in self.segment_ids)
            moved = jax.lax.psum(key_lengths - lengths, axis)
            i = i + jnp.take_along_axis(moved, jnp.maximum(ids - 1, 0), axis=1)
        i, (left, right) = i[:, :, None], window
        right = 0 if causal else right
        shown: Array = (ids[:, :, None] == keys[:, None, :]) & (ids[:, :, None] > 0)
        shown = shown & (j >= i - left) if left >= 0 else shown
        return shown & (j <= i + right) if right >= 0 else shown


def _pair(value: Any) -> Pair:
    """An array of queries and one of keys, which may be one. Raises: SpecError, TypeError."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise SpecError(f"a pair, of queries and of keys, is needed; got {len(value)} arrays")
        one, other = value
        return one, other
    if not hasattr(value, "shape"):
        raise TypeError(f"an array or a pair of them is needed; got {type(value).__name__}")
    return value, value


def _of_ids(ids: Array, segments: int) -> tuple[Array, Array]:
    """Lengths and offsets [b, n] of segments by the numbers of their tokens."""
    found = ids[..., None] == jnp.arange(1, segments + 1, dtype=ids.dtype)
    lengths = found.sum(1).astype(jnp.int32)
    offsets = jnp.where(lengths > 0, jnp.argmax(found, axis=1), -1)
    return lengths, offsets.astype(jnp.int32)


def _joined(lengths: Array, offsets: Array, tokens: int) -> Packed:
    """Segments of all rows, those of no tokens at the ends of their rows."""
    lengths = jnp.maximum(lengths, 0).astype(jnp.int32)
    rows, segments = lengths.shape
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] * tokens
    own = offsets[:, :segments].astype(jnp.int32)
    starts = jnp.where((lengths > 0) & (own >= 0), own, tokens) + first
    last = jnp.full(1, rows * tokens, jnp.int32)
    ends = jnp.cumsum(lengths.reshape(-1), dtype=jnp.int32)
    return Packed(
        jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        jnp.concatenate([starts.reshape(-1), last]),
    )
