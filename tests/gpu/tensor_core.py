"""How Hopper's tensor cores sum the products of 8-bit numbers, in plain PyTorch.

An instruction sums 32 products and what was summed before. Each of these terms is cut, towards
zero, below 2^-13 of the power of two of the largest among them (a product's being that of its
factors as they are stored), the cut terms are summed exactly, and the sum is cut below 2^-13 of
itself. `test_forward_fp8.py` holds scores to this, as far as a logarithm shows them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP = 32  # products of one instruction
KEPT_BITS = 13  # behind the leading one of the largest term
CHUNK = 1 << 26  # products in memory at once


def sums(q: Tensor, k: Tensor) -> Tensor:
    """Products of the rows of q [.., m, d] and k [.., n, d], float8, as tensor cores sum them:
    float32 [.., m, n]. d: a multiple of 16."""
    total = torch.zeros(*q.shape[:-1], k.shape[-2], device=q.device)
    for a, b in zip(q.float().split(STEP, -1), k.float().split(STEP, -1), strict=True):
        terms = a[..., :, None, :] * b[..., None, :, :]
        powers = _power(a, q.dtype)[..., :, None, :] + _power(b, k.dtype)[..., None, :, :]
        largest = torch.maximum(powers.amax(-1), _power(total)).clamp(min=-100)
        unit = torch.ldexp(torch.ones_like(total), largest - KEPT_BITS)
        total = ((terms / unit[..., None]).trunc().sum(-1) + (total / unit).trunc()) * unit
        unit = torch.ldexp(torch.ones_like(total), _power(total) - KEPT_BITS)
        total = (total / unit).trunc() * unit
    return total


def largest_errors(q: Tensor, k: Tensor) -> Tensor:
    """The largest error of the sums in each row of q [b, h, m, d], k [b, h, n, d]: float64
    [b, h, m]; 0 where there is no k."""
    found = q.new_zeros(q.shape[:-1], dtype=torch.float64)
    if not found.numel() or not k.shape[-2]:
        return found
    rows = max(1, CHUNK // (STEP * k.shape[-2]))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for part, into in zip(q[b, h].split(rows), found[b, h].split(rows), strict=True):
                exact = part.double() @ k[b, h].double().T
                into.copy_((sums(part, k[b, h]).double() - exact).abs().amax(-1))
    return found


def _power(x: Tensor, stored_as: torch.dtype = torch.float32) -> Tensor:
    """The exponent that each number is stored with; of 0 one below all others."""
    lowest = math.frexp(torch.finfo(stored_as).smallest_normal)[1] - 1
    return torch.where(x == 0, -60, (torch.frexp(x).exponent - 1).clamp(min=lowest))
