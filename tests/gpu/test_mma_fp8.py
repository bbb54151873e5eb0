"""The FP8 forward by products of warps against float64: on Hopper its kernels built for sm_90, on
any other chip whose tensor cores multiply 8 bits those of its own architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import attngen
from attngen.targets.target import TARGETS
from tests.support.caches import kernels_of

from . import oracle, oracle_fp8
from .cases_fp8 import Fp8Case
from .conftest import any_chip
from .test_fp8_token_scales import scaled

ARCH = any_chip() or "sm_90"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TARGETS[ARCH].fp8, reason=f"{ARCH} has no products of 8 bits"),
]


@pytest.fixture(autouse=True, scope="module")
def forced() -> Iterator[None]:
    """Calls run kernels of this target."""
    with kernels_of(ARCH) as launched:
        yield
    assert "mma_fwd" in launched and launched <= {"mma_fwd", "mask_pack", "varlen_prepare"}


CASES = [
    Fp8Case(64, 64, heads=(1, 2, 1), lengths=(130, 150), scaled=True),
    Fp8Case(128, 128, mask="causal", heads=(2, 2, 2), lengths=(200, 77), scaled=True),
    Fp8Case(80, 48, mask="causal_bottom_right", heads=(1, 4, 2), lengths=(65, 127)),
    Fp8Case(16, 256, heads=(1, 2, 1), lengths=(70, 130), layout="bhsd", scaled=True),
    Fp8Case(256, 16, window=(50, 20), heads=(1, 2, 2), lengths=(129, 200)),
    Fp8Case(64, 64, kv_dtype="e5m2", out_dtype="fp16", heads=(1, 3, 1), lengths=(40, 300)),
    Fp8Case(64, 64, "e5m2", "causal", out_dtype="e4m3", lengths=(90, 90), scaled=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma_fp8_forward_is_right(case):
    oracle_fp8.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize(
    "more",
    [
        {"softcap": 3.0, "mask": "causal"},
        {"dropout_p": 0.3, "mask": "causal"},
        {"softmax": "off_by_one"},
        {"scale_s": 64.0},
    ],
    ids=lambda more: "-".join(more),
)
def test_mma_fp8_forward_of_options_is_right(more):
    q, k, v = oracle_fp8.operands(1, 2, 1, 130, 170, 64)
    more = dict(more)
    if "dropout_p" in more:
        more["rng_state"] = torch.tensor([5, 9], device=oracle.DEVICE)
    if "scale_s" in more:
        scale = torch.tensor([more["scale_s"]], device=oracle.DEVICE)
        more |= {"scale_s": scale, "descale_s": 1 / scale}
    oracle_fp8.check_call(q, k, v, **more)


@pytest.mark.parametrize(
    "d, d_v, more",
    [
        (64, 64, {"mask": "causal"}),
        (128, 128, {"softcap": 20.0, "alibi_slopes": True}),
        (192, 128, {"mask": "causal", "bottom_right": True}),
        (80, 48, {"window": (70, 30), "dropout_p": 0.25}),
        (256, 256, {"mask": "causal", "scale_s": 64.0}),
    ],
    ids=str,
)
def test_mma_fp8_forward_with_scales_of_tokens_is_right(d, d_v, more):
    tensors, scales = scaled((1, 4, 2), (150, 290), d, d_v)
    if "dropout_p" in more:
        more = {**more, "rng_state": torch.tensor([4, 7], device=oracle.DEVICE)}
    if "scale_s" in more:
        factor = torch.tensor([more["scale_s"]], device=oracle.DEVICE)
        more = {**more, "scale_s": factor, "descale_s": 1 / factor}
    oracle_fp8.check_call(*tensors, softmax_scale=0.01, **more, **scales)


@pytest.mark.parametrize("d", [64, 128])
def test_mma_fp8_scales_of_tokens_let_no_key_change_another_row(d):
    """Rows of one product, of which the later see keys that others do not."""
    (q, k, v), scales = scaled((1, 1, 1), (64, 64), d)
    loud = {name: x.clone() for name, x in scales.items()}
    loud["descale_k"][..., 40:] *= 2**14
    loud["descale_v"][..., 40:] *= 2**14
    given = {"mask": "causal", "softmax_scale": 0.02, "backend": "cuda"}
    quiet, found = (attngen.attention(q, k, v, **given, **each) for each in (scales, loud))
    assert torch.equal(quiet[:, :40], found[:, :40]) and not torch.equal(quiet, found)


def test_mma_fp8_forward_returns_the_largest_score():
    q, k, v = oracle_fp8.operands(1, 4, 2, 70, 90, 128)
    _, aux = attngen.attention(q, k, v, return_max_logit=True, backend="cuda")
    wide = [x.double() for x in (q, k, v)]
    _, wanted = attngen.attention(*wide, return_max_logit=True, backend="reference")
    torch.testing.assert_close(aux.max_logit.double(), wanted.max_logit, rtol=1e-3, atol=1e-3)


def test_mma_fp8_forward_of_packed_tokens_is_right():
    q, k, v = oracle_fp8.operands(1, 2, 1, 200, 200, 64)
    q, k, v = (x[0].contiguous() for x in (q, k, v))
    lengths = torch.tensor([0, 70, 70, 199], dtype=torch.int32, device=oracle.DEVICE)
    more = {"layout": "thd", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 129}
    more |= {"max_seqlen_kv": 129, "mask": "causal"}
    found = attngen.attention(q, k, v, **more, backend="cuda")
    for first, end in ((0, 70), (70, 199)):
        part = [x[None, first:end] for x in (q, k, v)]
        alone = attngen.attention(*part, mask="causal", backend="cuda")
        assert torch.equal(found[first:end], alone[0])
    assert not found[199:].any()
