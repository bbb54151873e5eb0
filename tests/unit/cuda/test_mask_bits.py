"""Packed masks: what is packed is what the kernels' fragments find, in S and in its transpose."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from attngen.call.mask_bits import numbers_of, words_of

WIDTHS = (16, 48, 64, 112, 128)
SOURCE = """
#include "attngen/mask_bits.cuh"
using namespace attngen;
extern "C" u32 four(u32 bytes) { return bits_of_bytes(bytes); }
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


def pack(mask: torch.Tensor, length: int) -> torch.Tensor:
    """The bits of rows of that length, int32 [..., words]."""
    whole = torch.nn.functional.pad(mask, (0, 32 * words_of(length) - length))
    words = (whole.unflatten(-1, (-1, 32)).long() << torch.arange(32)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


@pytest.mark.parametrize(("b", "h"), [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize(("s_q", "s_kv"), [(5, 70), (1, 1), (33, 64), (129, 127)])
def test_strides_lead_to_every_bit_of_every_broadcast(b, h, s_q, s_kv) -> None:
    for rows, columns in ((s_q, s_kv), (1, s_kv), (s_q, 1), (1, 1)):
        mask = random_mask(b, h, rows, columns)
        full = mask.expand(b, h, s_q, s_kv)
        turned_about = mask.transpose(0, 1).clone().transpose(0, 1)
        for given in (mask, mask.expand(-1, -1, s_q, s_kv), turned_about):
            numbers = numbers_of(given, s_q, s_kv)
            sizes = numbers["attn_mask_batches"], numbers["attn_mask_heads"]
            assert sizes == (b, h)
            axes = ("batch", "head", "row", "column")
            own = [numbers[f"attn_mask_stride_{axis}"] for axis in axes]
            assert torch.equal(given.as_strided(full.shape, own), full)
            for name, turned in (("mask_rows", False), ("mask_columns", True)):
                expected = full.transpose(2, 3) if turned else full
                length = expected.shape[3]
                lines = columns if turned else rows
                bits = pack(expected[:, :, :lines], length)
                assert numbers[f"{name}_words"] == bits.numel()
                strides = [numbers[f"{name}_stride_{axis}"] for axis in axes[:3]]
                places = (*expected.shape[:3], bits.shape[3])
                found = bits.contiguous().as_strided(places, (*strides, 1))
                assert torch.equal(unpacked(found, length), expected)


def test_numbers_of_masks_of_fewer_axes_are_those_of_four() -> None:
    mask = random_mask(5, 40)
    assert numbers_of(mask, 5, 40) == numbers_of(mask[None, None], 5, 40)


def test_bits_of_four_bytes_are_those_that_are_not_zero(library) -> None:
    """A bool of PyTorch may hold any byte, as a view of others does; only 0 is False."""
    for values in itertools.product((0, 1, 2, 0x40, 0x7F, 0x80, 0xFF), repeat=4):
        bits = sum((value != 0) << k for k, value in enumerate(values))
        assert library.four(int.from_bytes(bytes(values), "little")) == bits


@pytest.mark.parametrize("n", WIDTHS)
def test_fragment_sees_what_the_mask_shows_and_stays_in_its_row(n: int, library) -> None:
    for length in (1, n - 1, n, 3 * n - 5, 1000):
        mask = random_mask(16, length)
        packed = pack(mask, length).numpy().astype(np.int32)
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
