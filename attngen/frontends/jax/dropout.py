"""Dropout as `attngen.reference` defines it, in 32-bit words: JAX has no others by default."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from .manual_axes import spread, varying

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def random_bytes(state: Array, sequence: Array, heads: Array, i: Array, j: Array) -> Array:
    """The byte behind each decision, uint32, a broadcast of [n, heads, rows, columns].

    state: uint32 [4], the halves of seed and offset, the low ones first. sequence: int32
    [n, rows]; heads: int32 [heads]; i: int32 [n, rows], positions in it; j: int32 [n, columns].
    """
    seed_low, seed_high, offset_low, offset_high = state
    head = heads.astype(jnp.uint32)[None, :, None, None]
    b, i, j = (x.astype(jnp.uint32) for x in (sequence, i, j))
    b, i, j = b[:, None, :, None], i[:, None, :, None], j[:, None, None, :]
    counter = (b, head, offset_low, offset_high)
    first, second, _, _ = philox(counter, (seed_low, seed_high))
    zero = jnp.uint32(0)
    words = philox((_call_of(i), _call_of(j), zero, zero), (first, second))
    word = (i & 1) | ((j & 1) << 1)
    even, odd = (jnp.where(j & 1 == 0, *pair) for pair in _pairs(words))
    chosen = jnp.where(word & 1 == 0, even, odd)
    byte = ((i >> 3) & 1) | (((j >> 3) & 1) << 1)
    return (chosen >> (8 * byte)) & 0xFF


def _pairs(words: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Words of even rows and of odd ones, of even and odd columns each."""
    one, two, three, four = words
    return (one, three), (two, four)


def philox(counter: tuple[Array, ...], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Philox-4x32-10: four random words of four counter words and two key words, all uint32."""
    words = jnp.broadcast_arrays(*counter, *key)
    state = [spread(x, varying(words)) for x in words]
    m0, m1 = (jnp.uint32(m) for m in PHILOX_M)
    w0, w1 = (jnp.uint32(w) for w in PHILOX_W)

    def turn(_: int, state: list[Array]) -> list[Array]:
        c0, c1, c2, c3, k0, k1 = state
        high0, low0 = _multiply(m0, c0)
        high1, low1 = _multiply(m1, c2)
        return [high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0, k0 + w0, k1 + w1]

    c0, c1, c2, c3, _, _ = jax.lax.fori_loop(0, ROUNDS, turn, state)
    return c0, c1, c2, c3


def _multiply(a: Array, b: Array) -> tuple[Array, Array]:
    """High and low words of products of words, from those of their halves."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16), a * b


def _call_of(position: Array) -> Array:
    """Counter of the call that serves a row or a column."""
    return (position >> 4) * 4 + ((position >> 1) & 3)
