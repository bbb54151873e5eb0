"""Scales of casts: the kernels' own code against the definition in torch, for every magnitude of 16
bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attngen.reference.fp8_scales import current_scale

SOURCE = """
#include "attngen/cast/scale.cuh"
using namespace attngen;
u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
float value_of(u32 bits) { return __builtin_bit_cast(float, bits); }
extern "C" void scales(const u32* magnitudes, int count, float largest, float least, float share,
                       int power_of_two, float* found) {
  const ScaleRule rule = {largest, least, share, power_of_two != 0};
  for (int i = 0; i < count; ++i) {
    found[i] = scale_of_bits(
        magnitudes[i], rule, [](float x) { return 1.f / x; }, bits_of, value_of);
  }
}
"""
RULES = [
    (torch.float8_e4m3fn, 0.0, 0, True),
    (torch.float8_e5m2, 0.0, 3, False),
    (torch.float8_e4m3fn, 0.75, -2, True),
    (torch.float8_e4m3fn, 1e-30, 0, False),
]


@pytest.fixture(scope="module")
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_cpp(SOURCE)))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scales_are_the_definition_s_bit_for_bit(library: ctypes.CDLL, dtype, rule) -> None:
    stored, least, margin, power_of_two = rule
    amax = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    found = np.zeros(amax.numel(), np.float32)
    given = amax.numpy()
    library.scales(
        *(ctypes.c_void_p(given.ctypes.data), given.size),
        *map(ctypes.c_float, (torch.finfo(stored).max, least, 2.0**-margin)),
        *(int(power_of_two), ctypes.c_void_p(found.ctypes.data)),
    )
    wanted = current_scale(amax, stored, margin, power_of_two, least)
    assert torch.equal(torch.from_numpy(found), wanted)
