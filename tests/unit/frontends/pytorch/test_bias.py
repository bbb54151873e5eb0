"""Biases as kernels are quick to read them: what is copied first, and how."""

from __future__ import annotations

import pytest
import torch

from attngen.frontends.pytorch.bias import readable


def bf16(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16)


AS_THEY_ARE = {
    "rows of whole 16 bytes": bf16(2, 3, 6, 16),
    "rows apart": bf16(2, 3, 6, 32)[..., :11],
    "broadcast over sequences": bf16(1, 3, 6, 8).expand(2, 3, 6, 8),
    "a part of a far larger tensor, which begins at an odd element": bf16(1, 2, 64, 64)[
        ..., :8, 1:9
    ],
    "one row": bf16(1, 1, 1, 9)[..., 1:],
    "one row, expanded": bf16(1, 1, 1, 9)[..., 1:].expand(1, 1, 6, 8),
    "one column": bf16(1, 3, 6, 1),
    "one column, expanded": bf16(1, 3, 6, 1).expand(1, 3, 6, 8),
}
COPIED = {
    "odd rows": bf16(2, 3, 6, 7),
    "odd rows, broadcast": bf16(1, 3, 6, 7).expand(2, 3, 6, 7),
    "columns apart": bf16(1, 3, 8, 6).transpose(2, 3),
    "an odd start": bf16(2, 3, 6, 24)[..., 1:17],
}


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_bias_that_kernels_read_quickly_is_not_copied(name: str) -> None:
    assert readable(AS_THEY_ARE[name]) is AS_THEY_ARE[name]


@pytest.mark.parametrize("name", COPIED)
def test_bias_that_the_copy_engine_cannot_read_is_copied_for_it(name: str) -> None:
    bias = COPIED[name]
    copy = readable(bias)
    assert torch.equal(copy, bias)
    assert readable(copy) is copy
    broadcast = [step == 0 for step in bias.stride()]
    assert [step == 0 for step in copy.stride()] == broadcast


def test_bias_that_only_begins_elsewhere_keeps_its_strides() -> None:
    bias = COPIED["an odd start"]
    assert readable(bias).stride() == bias.stride()
