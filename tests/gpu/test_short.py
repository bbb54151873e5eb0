"""Short calls, whose tiles are 64 queries: against float64, and which calls get them."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import AttentionSpec
from attngen.call.numbers import Arguments
from attngen.call.table import OPTIONAL
from attngen.frontends.pytorch import forward

from . import cases, gradients, oracle, variants
from .cases import Case
from .variants import Variant

pytestmark = pytest.mark.gpu
LENGTHS = (1, 7, 63, 64, 65, 100, 127, 129, 191, 192, 193, 255, 300, 321, 383, 448, 511, 512)
DIMS = ((64, 64), (128, 128), (72, 40), (96, 128))
KERNELS = [cases.spec(d, v, mask=mask) for d, v in DIMS for mask in ("none", "causal")]


def case_of(number: int, d: int, d_v: int, **fixed) -> Case:
    """Every length with others, masks, head counts and layouts that turn at different paces."""
    kind = cases.MASKS[cases.KINDS[number % 4]]
    mask, window, bottom_right = kind[number // 4 % len(kind)]
    lengths = LENGTHS[number % 18], LENGTHS[(5 * number + 3) % 18]
    heads, layout = cases.HEADS[number % 6], cases.LAYOUTS[number % 3]
    return Case(d, d_v, "bf16", mask, window, bottom_right, heads, lengths, layout, **fixed)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("number", range(0, 18))
def test_short_any_lengths_are_right(dims, number):
    case = case_of(number + 5 * DIMS.index(dims), *dims)
    oracle.check_call(*case.operands(), **case.arguments)


@pytest.mark.device
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_short_many_tiles_for_each_cta_are_right(d, mask):
    """A tile's remains must not reach the next tile, nor the SM's other CTA."""
    for s_q, s_kv in ((130, 130), (129, 500), (500, 33)):
        q, k, v = oracle.operands(40, 12, 4, s_q, s_kv, d)
        oracle.check_call(q, k, v, mask=mask)


VARIANTS = [
    Variant(case_of(6, 128, 128), "bh", "learnable", max_logit=True),
    Variant(case_of(9, 64, 64), "h", "off_by_one", softcap=20.0),
    Variant(case_of(12, 64, 64), "", "learnable", softcap=3.0, max_logit=True),
    Variant(case_of(15, 72, 40), "default", "learnable"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_short_with_scores_sinks_and_maxima_is_right(variant):
    variants.check_forward(variant)


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_short_captured_call_is_replayed_and_runs_agree(mask):
    q, k, v = oracle.operands(3, 6, 2, 129, 200, 64)
    with oracle.small_tiles(True):
        wanted = oracle.run((q, k, v), mask)
        graph, found = oracle.capture(lambda: oracle.run((q, k, v), mask))
        for _ in range(20):
            for each in found:
                each.fill_(float("nan"))
            graph.replay()
            assert oracle.same(found, wanted)


@pytest.mark.wgmma
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_short_call_has_right_gradients(mask):
    tensors = oracle.operands(4, 8, 8, 128, 128, 64)
    assert takes_small_tiles(*tensors, mask=mask)
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    out = attngen.attention(q, k, v, mask=mask, backend="cuda")
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=5)
    gradients.check(torch.autograd.grad(out, (q, k, v), d_o), (*tensors, d_o), None, mask=mask)


def takes_small_tiles(q, k, v, **asked) -> bool:
    ready = forward.find_prepared((q, k, v, *[None] * len(OPTIONAL)), Arguments(**asked))
    (launch,) = ready.launches
    entry = launch.loaded.kernel
    assert (entry.ctas > 1) == (entry.tile_rows == 64)
    return entry.ctas > 1


@pytest.mark.wgmma
@pytest.mark.device
@pytest.mark.parametrize(
    ("shape", "mask", "short"),
    [
        ((32, 128, 32, 64), "none", True),
        ((32, 512, 32, 64), "none", False),
        ((32, 64, 32, 64), "none", True),
        ((64, 128, 16, 128), "none", False),
        ((1, 128, 16, 128), "causal", True),
        ((1, 1025, 4, 64), "none", False),
        ((4, 128, 8, 256), "none", False),
    ],
)
def test_short_kernel_serves_calls_of_few_rows(shape, mask, short):
    x = torch.zeros(shape, device=oracle.DEVICE, dtype=torch.bfloat16)
    assert takes_small_tiles(x, x, x, mask=mask) == short


@pytest.mark.wgmma
@pytest.mark.device
@pytest.mark.parametrize("d", [64, 128])
def test_short_kernel_serves_windows_of_few_tiles(d):
    for batch, length, left, short in ((4, 4096, 127, False), (1, 1024, 511, True)):
        window = {"mask": "causal", "window_left": left, "window_right": 0}
        x = torch.zeros(batch, length, 16, d, device=oracle.DEVICE, dtype=torch.bfloat16)
        assert takes_small_tiles(x, x, x, **window) == short
    oracle.check_call(*oracle.operands(2, 8, 2, 1500, 1500, d), mask="causal", window=(127, 0))


@pytest.mark.wgmma
def test_short_spec_is_built_with_both_kernels():
    families = [built.plan.family for built in attngen.build(AttentionSpec(64), "sm_90a")]
    assert families == ["sm90_fwd", "sm90_fwd_short"]
