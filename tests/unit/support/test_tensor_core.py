"""The tensor cores' sums in PyTorch, to which the GPU tests hold kernels, beside an H200's."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import tensor_core

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def sum_of(q: list[float], k: list[float], kv_dtype: torch.dtype = E4M3) -> float:
    def row(x: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*x, *[0.0] * (-len(x) % 16)]]).to(dtype)

    return tensor_core.sums(row(q, E4M3), row(k, kv_dtype)).item()


@pytest.mark.parametrize(
    ("q", "k", "kv_dtype", "wanted"),
    [
        ([1, 1], [64, 2**-7], E5M2, 64 + 2**-7),  # 13 bits are kept
        ([1, 1], [64, 2**-8], E5M2, 64),
        ([1, -1], [64, 2**-8], E5M2, 64),  # towards zero, each term
        ([0, 1], [2**15, 2**-5], E5M2, 2**-5),  # 0 is no term
        ([2**-9, 1], [2**15, 2**-5], E5M2, 64),  # 2^-9 is stored with the exponent -6
        ([2**-9, 2**-6], [256, 2**-6], E4M3, 0.5),
    ],
    ids=str,
)
def test_sums_cut_what_is_far_below_the_largest_term(q, k, kv_dtype, wanted) -> None:
    assert sum_of(q, k, kv_dtype) == wanted


def test_sums_of_more_than_an_instruction_cut_what_was_summed_before() -> None:
    q, k = [2**-7, *[0.0] * 31, 1.0], [1.0] * 33
    assert sum_of(q, k) == 1 + 2**-7
    assert sum_of([2**-9, *q[1:-1], 32.0], [2**-1, *k[1:]]) == 32


def test_largest_errors_are_those_of_the_worst_key() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 5, 80, generator=generator).to(E4M3) for _ in range(2))
    exact = q.double() @ k.double().transpose(-1, -2)
    wanted = (tensor_core.sums(q, k) - exact).abs().amax(-1)
    assert (wanted > 0).all()
    torch.testing.assert_close(tensor_core.largest_errors(q, k), wanted, rtol=0, atol=0)
    assert not tensor_core.largest_errors(q, k[:, :, :0]).any()
