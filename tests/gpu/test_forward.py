"""The forward against float64: head dims, masks, dtypes, GQA ratios, layouts, float32 output."""

from __future__ import annotations

import pytest
import torch

from . import cases, oracle

pytestmark = pytest.mark.gpu
KERNELS = [
    *cases.core_specs(64, 128, 256),
    *(
        cases.spec(192, 128, mask=mask, window=window)
        for mask in ("none", "causal")
        for window in ((-1, -1), (9, 0))
    ),
]


@pytest.mark.parametrize("case", cases.every_head_dim(), ids=str)
def test_forward_every_head_dim_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases.fp16_head_dims(), ids=str)
def test_forward_fp16_head_dims_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases.unequal_head_dims(), ids=str)
def test_forward_unequal_head_dims_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases.every_mask(), ids=str)
def test_forward_every_mask_is_right(case):
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases.partial_cases(), ids=str)
def test_forward_partial_returns_right_float32(case):
    q, k, v = case.operands()
    aligned = case.mask.endswith("bottom_right")
    low = aligned if case.bottom_right is None else case.bottom_right
    with oracle.nan_filled_allocations():
        out, lse, *_ = torch.ops.attngen.forward(
            *(q, k, v),
            layout=case.layout,
            mask=case.mask,
            window_left=case.window[0],
            window_right=case.window[1],
            bottom_right=low,
            out_dtype="float32",
        )
    assert out.dtype == torch.float32
    oracle.check(out, lse, oracle.truth(q, k, v, **case.arguments), case.layout)


@pytest.mark.parametrize(
    "heads", [(2, 2, 1), (1, 6, 3), (2, 12, 4), (1, 16, 2), (1, 71, 1)], ids=str
)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_forward_head_ratio_reads_the_right_group(heads, mask):
    q, k, v = oracle.operands(*heads, 150, 150, 64)
    oracle.check_call(q, k, v, mask=mask)


@pytest.mark.device
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_forward_many_tiles_for_each_multiprocessor_is_right(dims, kind):
    """A tile's rings, barriers and staged output must not reach the next tile."""
    mask, window, bottom_right = cases.MASKS[kind][-1]
    for s_q, s_kv in ((1300, 1300), (1300, 77), (60, 500)):
        q, k, v = oracle.operands(20, 12, 4, s_q, s_kv, *dims)
        oracle.check_call(q, k, v, mask=mask, window=window, bottom_right=bottom_right)


def test_forward_full_layout_name_means_its_short_one():
    q, k, v = oracle.operands(1, 2, 2, 90, 90, 64, layout="sbhd")
    oracle.check_call(q, k, v, layout="sbhd_sbhd_sbhd")
