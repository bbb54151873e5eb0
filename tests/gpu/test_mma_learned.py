"""Gradients of what scores capture, by products of warps, against float64: on Hopper kernels built
for sm_90, on any other chip that has kernels those of its own architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.caches import kernels_of

from . import oracle
from .conftest import any_chip
from .test_callables import HEADS, KEYS, ROWS, check_learned

pytestmark = pytest.mark.gpu
ARCH = any_chip() or "sm_90"


@pytest.fixture(autouse=True, scope="module")
def forced() -> Iterator[None]:
    """Calls run kernels of this target."""
    with kernels_of(ARCH) as launched:
        yield
    assert {"mma_bwd", "mma_bwd_dlearned"} <= launched
    assert not [name for name in launched if name.startswith("sm90_")]


@pytest.mark.parametrize("name", ["heads and rows", "distances", "full"])
@pytest.mark.parametrize("d", [64, 80])
def test_mma_gradients_of_captured_tensors_are_right(name, d) -> None:
    check_learned(name, d, deterministic=d == 64)


def test_mma_gradients_of_captured_tensors_beside_masks_and_dropout_are_right() -> None:
    seed = torch.tensor([7, 0], device=oracle.DEVICE)
    check_learned("cap", 128, mask="causal_bottom_right", dropout_p=0.25, rng_state=seed)
    shown = torch.arange(KEYS, device=oracle.DEVICE) % 11 != 4
    check_learned("table", 64, window=(40, 30), attn_mask=shown)


@pytest.mark.parametrize("bias_type", ["pre_scale", "post_scale"])
def test_mma_gradients_of_captured_tensors_beside_a_bias_are_right(bias_type) -> None:
    bias = oracle.randn(HEADS, ROWS, KEYS, dtype=torch.bfloat16, seed=9)
    check_learned("heads and rows", 64, bias=bias, bias_type=bias_type, softcap=4.0)
