"""Dropout as kernels know it: a threshold of random bytes, and the factor of what is kept."""

from __future__ import annotations

import struct


def drop_threshold(p: float) -> int:
    """Bytes below this number, 0..256, drop their element; p is the drop probability."""
    if p <= 0.0 or p >= 1.0:
        return 0 if p <= 0.0 else 256
    return min(max(round(float(p * 256)), 1), 255)  # a tensor has no round()


def keep_scale(p: float) -> float:
    """Factor on the probabilities that are kept, 1 / (1 - p rounded); 0 where none is."""
    threshold = drop_threshold(p)
    return 0.0 if threshold == 256 else 256 / (256 - threshold)


def dropout_numbers(p: float) -> dict[str, int | float]:
    """Numbers of the drop probability for kernels: the threshold of attngen/dropout.cuh (bytes, or
    as a float16 number, twice), and the factor of the weights that are kept, with its
    reciprocal."""
    threshold = drop_threshold(p)
    high = threshold >= 128
    numbers = {"drop_low": (threshold - 128 * high) * 0x01010101, "drop_high": high * 0x80808080}
    (limit,) = struct.unpack("<H", struct.pack("<e", -1023.0 - threshold))
    numbers["drop_limit"] = limit * 0x00010001
    # Where nothing is kept the factor multiplies zeros alone.
    scale = keep_scale(p) or 1.0
    return {
        **{name: word - (word >> 31 << 32) for name, word in numbers.items()},  # as an int32
        "keep_scale": scale,
        "keep_share": 1 / scale,
    }
