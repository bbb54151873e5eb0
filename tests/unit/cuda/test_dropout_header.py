"""attngen/dropout.cuh: the bits of the kernels are the reference's, in S and in its transpose."""

from __future__ import annotations

import ctypes
import json

import numpy as np
import pytest
import torch

from attngen.call.dropout import drop_threshold, dropout_numbers, keep_scale
from attngen.reference.dropout import dropout_keep_mask, philox_4x32_10, sequence_bytes
from tests.support.paths import ROOT

FROZEN = json.loads((ROOT / "tests/support/data" / "dropout_bits.json").read_text())
STATES = [(0, 0), (1, 2), (-1, -(2**63)), (2**63 - 1, 0x0123456789ABCDEF)]
SOURCE = """
#include "attngen/dropout_bytes.cuh"
#include "attngen/dropout_places.cuh"
#include "attngen/mma/fragment.cuh"
using namespace attngen;

extern "C" void draw_words(const u32* c, const u32* k, u32* out) {
  u32 words[4];
  philox(words, c[0], c[1], c[2], c[3], k[0], k[1]);
  for (int i = 0; i < 4; ++i) out[i] = words[i];
}
extern "C" u32 kept(u32 bytes, u32 low, u32 high) { return DropThreshold{low, high}.kept(bytes); }

// Where the element of a byte lies that a register has of a row of a lane, in 16 columns of 8 bits.
int place_of_byte(int lane, int tile, int row, int byte, int columns) {
  return (lane / 4 + 8 * row) * columns + tile * 16 + lane % 4 * 2 + byte / 2 * 8 + byte % 2;
}

// What a warp drops of 16 rows and kN columns, by the sign of each weight. bytes: what is left of
// each weight of 8 bits, where those of S^T are drawn for 64 queries.
template <int kN, bool kKeysAreRows>
void fragment(const long long* state, int b, int h, u32 low, u32 high, int row, int column,
              char* signs, unsigned char* bytes) {
  using Bits = DropBits<kN>;
  const DropoutKey key = dropout_key(state, b, h);
  const DropThreshold threshold = {low, high};
  for (int lane = 0; lane < 32; ++lane) {
    const DropCalls<kKeysAreRows> calls(key, row, column, lane);
    const DropCalls<kKeysAreRows> partner(key, row, column, lane ^ 4);
    u32 own[4], others[4];
    Bits::decide(own, calls, threshold);
    Bits::decide(others, partner, threshold);
    Bits bits;
    bits.join(own, Bits::template passed<kKeysAreRows>(others, partner.odd_row), calls, threshold);
    for (int i = 0; i < kN / 2; ++i) {
      const int at = (lane / 4 + 8 * fragment_row(i)) * kN + lane % 4 * 2 + fragment_column(i);
      signs[at] = bits.template sign<kKeysAreRows>(i) != 0;
      if constexpr (kKeysAreRows && kN == 64) {
        if (KeptBits(bits).keeps(i) == (signs[at] != 0)) signs[at] = 2;
      }
    }
    if constexpr (kKeysAreRows && kN == 64) {
      for (int i = 0; i < 32; ++i) {
        const u32 left = KeptBits(bits).bytes(i / 8, i / 4 % 2) >> i % 4 * 8;
        bytes[place_of_byte(lane, i / 8, i / 4 % 2, i % 4, kN)] = left;
      }
    }
  }
}

// The float16 numbers that decide the same, of S, from words that lanes leave each other; bytes:
// what is left of each weight of 8 bits.
template <int kN>
void words(const long long* state, int b, int h, u32 low, u32 high, int row, int column,
           unsigned short* numbers, unsigned char* bytes) {
  const DropThreshold threshold = {low, high};
  using Words = DropWords<kN>;
  u32 shared[Words::kBytes / 4];
  for (int lane = 0; lane < 32; ++lane) {
    DropRow rows;
    rows.begin(dropout_key(state, b, h), row, lane);
    for (int i = 0; i < Words::kCalls; ++i) {
      const int tile = Words::tile_of(i, lane);
      u32 drawn[4];
      rows.call(drawn, Words::counter(column, tile, lane));
      Words::in_rows(shared + (Words::place(lane) + tile * Words::kTileBytes) / 4, drawn);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kN / 2; ++i) {
      const int pair = i / 2;
      const u32* found = shared + (Words::half(lane) + pair / 4 * Words::kTileBytes) / 4;
      const u32 two = Words::number(found[0], found[1], pair % 4, 0xe400e400u);
      numbers[(lane / 4 + 8 * fragment_row(i)) * kN + lane % 4 * 2 + fragment_column(i)] =
          two >> (i % 2 * 16);
    }
    for (int i = 0; i < kN / 2; ++i) {
      const u32* found = shared + (Words::half(lane) + i / 8 * Words::kTileBytes) / 4;
      const u32 even = threshold.kept(found[0]), odd = threshold.kept(found[1]);
      bytes[place_of_byte(lane, i / 8, i / 4 % 2, i % 4, kN)] =
          kept_bytes(even, odd, i / 4 % 2) >> i % 4 * 8;
    }
  }
}

// Both of a part whose first row and column stand anywhere.
template <bool kKeysAreRows>
void apart(const long long* state, u32 low, u32 high, int row, int column, char* signs,
           unsigned short* numbers) {
  constexpr int kN = 48;
  for (int lane = 0; lane < 32; ++lane) {
    // A part of the position is the fragment's own in its sequence.
    PlacedDropoutKey key = {dropout_key(state, 1, 2), row - 48, column - 7};
    if (kKeysAreRows) key = {dropout_key(state, 1, 2), column - 7, row - 48};
    const PlacedDropCalls<kKeysAreRows> calls(key, 48, 7, lane);
    DropBits<kN> bits;
    decide_apart(bits, calls, DropThreshold{low, high});
    for (int i = 0; i < kN / 2; ++i) {
      const int at = (lane / 4 + 8 * fragment_row(i)) * kN + lane % 4 * 2 + fragment_column(i);
      signs[at] = bits.template sign<kKeysAreRows>(i) != 0;
      if constexpr (!kKeysAreRows) {
        const DropPair pair = words_apart(calls, i / 8);
        const u32 two = DropWords<kN>::number(pair.even, pair.odd, i / 2 % 4, 0xe400e400u);
        numbers[at] = two >> (i % 2 * 16);
      }
    }
  }
}
extern "C" void apart_0(const long long* state, u32 low, u32 high, int row, int column, char* signs,
                        unsigned short* numbers) {
  apart<false>(state, low, high, row, column, signs, numbers);
}
extern "C" void apart_1(const long long* state, u32 low, u32 high, int row, int column, char* signs,
                        unsigned short* numbers) {
  apart<true>(state, low, high, row, column, signs, numbers);
}
"""
WIDTHS = (16, 48, 64, 112, 128)
ENTRIES = "".join(
    f'extern "C" void fragment_{n}_{int(turned)}(const long long* state, int b, int h, u32 low, '
    "u32 high, int row, int column, char* signs, unsigned char* bytes) { "
    f"fragment<{n}, {str(turned).lower()}>(state, b, h, low, high, row, column, signs, bytes); }}\n"
    for n in WIDTHS
    for turned in (False, True)
) + "".join(
    f'extern "C" void words_{n}(const long long* state, int b, int h, u32 low, u32 high, int row, '
    "int column, unsigned short* numbers, unsigned char* bytes) { "
    f"words<{n}>(state, b, h, low, high, row, column, numbers, bytes); }}\n"
    for n in WIDTHS
)


@pytest.fixture(scope="module")
def library(compile_cpp) -> ctypes.CDLL:
    found = ctypes.CDLL(str(compile_cpp(SOURCE + ENTRIES)))
    found.kept.restype = ctypes.c_uint32
    found.kept.argtypes = [ctypes.c_uint32] * 3
    return found


def words_of(p: float) -> tuple[int, int]:
    """The threshold as a kernel's parameters hold it."""
    numbers = dropout_numbers(p)
    return int(numbers["drop_low"]) & 0xFFFFFFFF, int(numbers["drop_high"]) & 0xFFFFFFFF


def fragment_of(library, n, turned, state, b, h, p, row, column) -> np.ndarray:
    """Draw with the kernels' code what a warp keeps of its 16 rows, bool [16, n]."""
    signs, numbers = np.zeros((16, n), np.int8), np.zeros((16, n), np.float16)
    left = np.zeros((16, n), np.uint8)
    state_address = np.array(state, dtype=np.int64).ctypes
    low, high = (ctypes.c_uint32(word) for word in words_of(p))
    getattr(library, f"fragment_{n}_{int(turned)}")(
        state_address.data_as(ctypes.c_void_p), b, h, low, high, row, column,
        signs.ctypes.data_as(ctypes.c_void_p), left.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    if not turned:
        getattr(library, f"words_{n}")(
            state_address.data_as(ctypes.c_void_p), b, h, low, high, row, column,
            numbers.ctypes.data_as(ctypes.c_void_p), left.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        limit = np.array([dropout_numbers(p)["drop_limit"]], np.int32).view(np.float16)
        assert limit[0] == limit[1] == -1023 - drop_threshold(p)
        excess = np.clip(limit[0] - numbers, 0, 1)
        assert ((excess == 0) == (signs == 1)).all() and ((excess == 1) == (signs == 0)).all()
    if not turned or n == 64:
        assert (left == np.where(signs == 0, 255, 0)).all(), "weights of 8 bits"
    assert (signs < 2).all(), "one bit a weight"
    return signs == 0


def test_philox_of_the_header_equals_the_reference(library) -> None:
    inputs = np.random.default_rng(3).integers(0, 2**32, (200, 6), dtype=np.uint32)
    for row in inputs:
        out = np.zeros(4, np.uint32)
        counter, key = row[:4].copy(), row[4:].copy()
        library.draw_words(*(x.ctypes.data_as(ctypes.c_void_p) for x in (counter, key, out)))
        words = [torch.tensor(int(word)) for word in row]
        assert out.tolist() == [int(x) for x in philox_4x32_10(tuple(words[:4]), tuple(words[4:]))]


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.4999, 0.5, 0.501, 0.9, 0.9999, 1.0])
def test_threshold_every_byte_is_compared_alone(p: float, library) -> None:
    """In each of the four places, beside neighbours that could lend or borrow."""
    threshold = drop_threshold(p)
    for byte in range(256):
        for others in (0x00, 0x7F, 0x80, 0xFF):
            for place in range(4):
                bytes_ = [others] * 4
                bytes_[place] = byte
                found = library.kept(int.from_bytes(bytes(bytes_), "little"), *words_of(p))
                expected = [0x80 * (each >= threshold) for each in bytes_]
                assert [*found.to_bytes(4, "little")] == expected


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_dropout_numbers_scale_is_the_reference_s_and_finite(p: float) -> None:
    numbers = dropout_numbers(p)
    assert numbers["keep_scale"] == (keep_scale(p) if p < 1 else 1.0)
    assert numbers["keep_scale"] * numbers["keep_share"] == pytest.approx(1, rel=1e-15)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n", WIDTHS)
def test_fragment_every_decision_is_the_reference_s(n, turned, state, library) -> None:
    for number, (row, column) in enumerate([(0, 0), (48, 2 * n), (16 * 7, 0)]):
        p, b, h = (0.1, 0.5, 0.7)[number], number, 2 - number
        s_q, s_kv = (column + n, row + 16) if turned else (row + 16, column + n)
        mask = dropout_keep_mask(torch.tensor(state), p, b + 1, h + 1, s_q, s_kv)[b, h].numpy()
        expected = mask.T if turned else mask
        found = fragment_of(library, n, turned, state, b, h, p, row, column)
        assert (found == expected[row : row + 16, column : column + n]).all()


@pytest.mark.parametrize("case", FROZEN["cases"], ids=lambda c: f"seed{c['seed']}_b{c['b']}")
def test_fragment_decisions_are_the_frozen_ones(case, library) -> None:
    rows = np.array([list(bytes.fromhex(row)) for row in case["rows"]])
    s_q, s_kv = (size // 16 * 16 for size in rows.shape)
    state = (case["seed"], case["offset"])
    assert s_q >= 16 and s_kv >= 16
    for row in range(0, s_q, 16):
        for column in range(0, s_kv, 16):
            found = fragment_of(library, 16, False, state, case["b"], case["h"], 0.3, row, column)
            assert (found == (rows[row : row + 16, column : column + 16] >= 77)).all()


def test_sequence_bytes_far_positions_are_the_header_s(library) -> None:
    """Counters beyond 16 bits, where a narrower one would wrap."""
    column = 5 * 2**16
    drawn = sequence_bytes(torch.tensor((3, 4)), 0, 1, 16, column + 16)[0, :, column:]
    found = fragment_of(library, 16, False, (3, 4), 0, 0, 0.5, 0, column)
    assert (found == (drawn >= 128).numpy()).all()


@pytest.mark.parametrize("turned", [False, True])
def test_part_decisions_are_those_of_the_whole(turned, library) -> None:
    """A part's first row and column may stand anywhere, also where calls straddle its edges."""
    mask = dropout_keep_mask(torch.tensor((5, 6)), 0.4, 2, 3, 90, 90)[1, 2].numpy()
    signs, numbers = np.zeros((16, 48), np.int8), np.zeros((16, 48), np.float16)
    state = np.array((5, 6), dtype=np.int64).ctypes.data_as(ctypes.c_void_p)
    low, high = (ctypes.c_uint32(word) for word in words_of(0.4))
    limit = np.array([dropout_numbers(0.4)["drop_limit"]], np.int32).view(np.float16)[0]
    for row, column in ((16, 32), (13, 32), (16, 7), (11, 1), (8, 8)):
        getattr(library, f"apart_{int(turned)}")(
            state, low, high, row, column,
            *(x.ctypes.data_as(ctypes.c_void_p) for x in (signs, numbers)),
        )  # fmt: skip
        kept = (mask.T if turned else mask)[row : row + 16, column : column + 48]
        assert ((signs == 0) == kept).all()
        if not turned:
            assert ((np.clip(limit - numbers, 0, 1) == 1) == kept).all()
