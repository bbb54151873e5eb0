"""Packed masks: what is packed is what the kernels' fragments find, in S and in its transpose."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from attngen.ops import mask_bits

WIDTHS = (16, 48, 64, 112, 128)
SOURCE = """
#include "attngen/mask_bits.cuh"
using namespace attngen;
// What a warp sees of 16 rows and kN columns; rows: words of the packed mask, `pitch` apart.
template <int kN>
void fragment(const u32* rows, int pitch, int column, char* seen) {
  for (int lane = 0; lane < 32; ++lane) {
    MaskBits<kN> bits;
    for (int half = 0; half < 2; ++half) {
      bits.load(half, rows + (lane / 4 + 8 * half) * pitch, column, lane);
    }
    for (int i = 0; i < kN / 2; ++i) {
      const int row = lane / 4 + 8 * fragment_row(i);
      seen[row * kN + lane % 4 * 2 + fragment_column(i)] = bits.sees(i);
    }
  }
}
"""
ENTRIES = "".join(
    f'extern "C" void fragment_{n}(const u32* rows, int pitch, int column, char* seen) '
    f"{{ fragment<{n}>(rows, pitch, column, seen); }}\n"
    for n in WIDTHS
)


def random_mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5


def unpacked(packed: torch.Tensor, length: int) -> torch.Tensor:
    bits = torch.stack([packed >> k & 1 for k in range(32)], dim=-1).flatten(-2).bool()
    assert not bits[..., length:].any()
    return bits[..., :length]


@pytest.fixture(scope="module")
def library(compile_cpp) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_cpp(SOURCE + ENTRIES)))


@pytest.mark.parametrize(("b", "h"), [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize(("s_q", "s_kv"), [(5, 70), (1, 1), (33, 64), (129, 127)])
def test_pack_every_broadcast_keeps_its_bits_where_the_strides_say(b, h, s_q, s_kv) -> None:
    for rows, columns in ((s_q, s_kv), (1, s_kv), (s_q, 1), (1, 1)):
        mask = random_mask(b, h, rows, columns)
        numbers = mask_bits.numbers_of(mask.shape, s_q, s_kv)
        full = mask.expand(b, h, s_q, s_kv)
        for name, turned in (("attn_mask", False), ("attn_mask_columns", True)):
            packed = mask_bits.pack(mask, s_q, s_kv, columns=turned)
            strides = [numbers[f"{name}_stride_{axis}"] for axis in ("batch", "head", "row")]
            expected = full.transpose(2, 3) if turned else full
            found = packed.as_strided((*expected.shape[:3], packed.shape[3]), (*strides, 1))
            assert torch.equal(unpacked(found, expected.shape[3]), expected)


def test_pack_masks_of_fewer_axes_and_any_strides() -> None:
    mask = random_mask(4, 6, 5, 40)
    assert torch.equal(mask_bits.pack(mask[0, 0], 5, 40), mask_bits.pack(mask[:1, :1], 5, 40))
    turned = mask.transpose(0, 1)
    assert torch.equal(mask_bits.pack(turned, 5, 40), mask_bits.pack(turned.clone(), 5, 40))


@pytest.mark.parametrize("n", WIDTHS)
def test_fragment_sees_what_the_mask_shows_and_stays_in_its_row(n: int, library) -> None:
    for length in (1, n - 1, n, 3 * n - 5, 1000):
        mask = random_mask(16, length)
        packed = mask_bits.pack(mask, 16, length)[0, 0].numpy().astype(np.int32)
        for column in range(0, length, n):
            assert (column + n) // 32 + 1 < packed.shape[1]  # what is read lies inside the row
            seen = np.zeros((16, n), np.int8)
            getattr(library, f"fragment_{n}")(
                packed.ctypes.data_as(ctypes.c_void_p), packed.shape[1], column,
                seen.ctypes.data_as(ctypes.c_void_p),
            )  # fmt: skip
            expected = np.zeros((16, n), bool)
            part = mask[:, column : column + n].numpy()
            expected[:, : part.shape[1]] = part
            assert (seen == expected).all()
