"""The dropout mask: one frozen function of (seed, offset, b, h, i, j), for every backend.

The decision for the score of query i and key j, in head h of sequence b, does not depend on
tiles, kernels, architectures or layouts. For packed sequences b is the sequence and i, j are
positions inside it. It comes from Philox-4x32-10, in two levels:

1. A key per head. `(k0, k1, _, _) = Philox(counter=(b, h, offset_lo, offset_hi),
   key=(seed_lo, seed_hi))`, where lo and hi are the 32-bit halves of the two int64 numbers.
2. Sixteen decisions per call. With `row(i) = (i >> 4) * 4 + ((i >> 1) & 3)` and col(j) the
   same of j, `Philox(counter=(row(i), col(j), 0, 0), key=(k0, k1))` gives four words. Element
   (i, j) owns the byte `((i >> 3) & 1) | (((j >> 3) & 1) << 1)`, counted from the least
   significant, of the word `(i & 1) | ((j & 1) << 1)`.

So one call serves the rows {i, i+1, i+8, i+9} and the columns {j, j+1, j+8, j+9}, i and j even
and below 8 modulo 16. In a 16 × 16 tile of a matrix instruction's accumulator, lane l holds rows
r = l / 4 and r + 8 and columns c = 2 (l mod 4), c + 1, c + 8, c + 9. Lane l and lane l ^ 4 (row
r ^ 1) therefore need one call between them, each two of its words; and because rows and columns
play the same part, this is as true of Sᵀ as of S.

A decision is that byte against a threshold: with `t = round(p * 256)`, clamped to 1..255 unless p
is exactly 0 or 1, an element is dropped when its byte is below t. The probability is then exactly
t / 256, and what is kept is scaled by `1 / (1 - t / 256)`. The rounding is half to even.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.dropout import drop_threshold
from ..call.positions import Positions
from ..call.table import AttentionCall
from .masks import positions_of

MASK32 = 0xFFFFFFFF
WHOLE = Positions(0, 0, 0)
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_rng_state(device: torch.device) -> Tensor:
    """A fresh (seed, offset), int64 [2], from PyTorch's generator of the device, made there."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_keep_mask(
    rng_state: Tensor,
    p: float,
    batch: int,
    heads: int,
    s_q: int,
    s_kv: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which probabilities survive, bool [batch, heads, s_q, s_kv], True = keep.

    rng_state: int64 [2], (seed, offset), on any device.
    p: drop probability in 0..1, rounded as the module says.
    device: where the mask is made; rng_state's device by default.
    """
    state = rng_state.to(device)
    sequences = [sequence_bytes(state, b, heads, s_q, s_kv) for b in range(batch)]
    if not sequences:
        return torch.empty(0, heads, s_q, s_kv, dtype=torch.bool, device=state.device)
    return torch.stack(sequences) >= drop_threshold(p)


def sequence_bytes(
    rng_state: Tensor, b: int, heads: int, s_q: int, s_kv: int, first: Positions = WHOLE
) -> Tensor:
    """The random byte behind every decision of sequence b, int64 [heads, s_q, s_kv], 0..255; of a
    part of longer sequences, that begins where `first` says."""
    i = torch.arange(s_q, device=rng_state.device) + first.query
    j = torch.arange(s_kv, device=rng_state.device) + first.key
    rows, cols = _calls_along(first.query, s_q), _calls_along(first.key, s_kv)
    head = torch.arange(heads, device=rng_state.device) + first.head
    words = _words_of_calls(rng_state, first.sequence + b, head, rows, cols)
    word = (i & 1)[:, None] | ((j & 1) << 1)[None, :]
    byte = ((i >> 3) & 1)[:, None] | (((j >> 3) & 1) << 1)[None, :]
    own_rows, own_cols = _call_of(i) - rows.start, _call_of(j) - cols.start
    chosen = words[:, own_rows[:, None], own_cols[None, :], word]
    return (chosen >> (8 * byte)) & 0xFF


def bytes_of(call: AttentionCall, rng_state: Tensor, b: int, shape: Sequence[int]) -> Tensor:
    """The random bytes of a call's scores of sequence b, of this shape [h_q, s_q, s_kv]."""
    heads, s_q, s_kv = shape
    first = positions_of(call, b) or WHOLE
    return sequence_bytes(rng_state, b, heads, s_q, s_kv, first)


def philox_4x32_10(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words from four counter words and two key words, element by element.

    All are int64 tensors that hold unsigned 32-bit values, broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply_32(PHILOX_M0, c0)
        high1, low1 = _multiply_32(PHILOX_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3


def _multiply_32(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b; b is halved, as the whole product overflows an int64."""
    low_product = a * (b & 0xFFFF)
    high_product = a * (b >> 16) + (low_product >> 16)
    return high_product >> 16, ((high_product & 0xFFFF) << 16) | (low_product & 0xFFFF)


def _words_of_calls(rng_state: Tensor, b: int, head: Tensor, rows: range, cols: range) -> Tensor:
    """Output words of Philox calls of sequence b, int64 [heads, rows, cols, 4]. head: int64."""
    device = rng_state.device
    zero = torch.zeros((), dtype=torch.int64, device=device)
    seed, offset = rng_state[0], rng_state[1]
    key = (seed & MASK32, (seed >> 32) & MASK32)
    k0, k1, _, _ = philox_4x32_10((zero + b, head, offset & MASK32, (offset >> 32) & MASK32), key)
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    col = torch.arange(cols.start, cols.stop, device=device)[None, :]
    words = philox_4x32_10((row, col, zero, zero), (k0[:, None, None], k1[:, None, None]))
    return torch.stack(words, dim=-1)


def _call_of(position: Tensor) -> Tensor:
    """Counter of the call that serves a row or column position."""
    return (position >> 4) * 4 + ((position >> 1) & 3)


def _calls_along(first: int, length: int) -> range:
    """Calls that cover that many rows or columns from the first: four for each sixteen begun."""
    return range(first // 16 * 4, (first + length + 15) // 16 * 4)
