"""The backward by products of warps against float64: on Hopper its kernels built for sm_90, on any
other chip that has kernels those of its own architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import attngen
from tests.support.caches import kernels_of

from . import gradients, hostile, oracle, test_backward_parts, variants
from .cases import Case
from .conftest import any_chip
from .variants import Variant
from .varlen import Call, Features
from .varlen import check as check_varying

pytestmark = pytest.mark.gpu
ARCH = any_chip() or "sm_90"
AROUND = {"bwd_clear", "bwd_convert", "bwd_row_sums", "mask_pack", "mma_bwd_dbias"}


@pytest.fixture(autouse=True, scope="module")
def forced() -> Iterator[None]:
    """Calls run kernels of this target."""
    with kernels_of(ARCH) as launched:
        yield
    assert {"mma_fwd", "mma_bwd"} <= launched <= {"mma_fwd", "mma_bwd"} | AROUND


VARIANTS = [
    Variant(Case(64, 64, "bf16", "causal", heads=(1, 2, 1), lengths=(130, 150))),
    Variant(Case(64, 64, "fp16", heads=(1, 2, 2), lengths=(65, 200), layout="bhsd")),
    Variant(Case(128, 128, "bf16", "causal", heads=(2, 4, 2), lengths=(100, 40))),
    Variant(Case(128, 128, "fp16", heads=(1, 2, 1), lengths=(70, 130)), deterministic=True),
    Variant(Case(96, 40, "bf16", "causal", (40, 0), heads=(1, 2, 1), lengths=(130, 200))),
    Variant(Case(72, 128, "bf16", "none", (50, 20), True, (1, 2, 1), (90, 120)), "bh", "learnable"),
    Variant(Case(64, 64, "bf16", "causal", heads=(1, 2, 1), lengths=(70, 90)), softcap=3.0),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mma_backward_is_right(variant):
    variants.check_backward(variant)


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_mma_backward_of_long_sequences_of_wide_heads_is_hoppers(mask):
    """Too long for float64: beside the kernels that Hopper has of its own."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no other kernels to compare with")
    q, k, v, d_o = (
        oracle.randn(1, 16384, 16, 256, dtype=torch.bfloat16, seed=seed) for seed in range(4)
    )

    def gradients_of(arch: str) -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with kernels_of(arch):
            out = attngen.attention(*inputs, mask=mask, backend="cuda")
            return out, *torch.autograd.grad(out, inputs, d_o)

    for name, found, wanted in zip(
        ("o", "dq", "dk", "dv"), gradients_of(ARCH), gradients_of("sm_90a"), strict=True
    ):
        error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert error <= 0.02, name


def test_mma_backward_drops_what_the_forward_drops():
    q, k, v = oracle.operands(2, 2, 1, 70, 130, 64)
    state = torch.tensor([5, 9], device=oracle.DEVICE)
    check(q, k, v, mask="causal", dropout_p=0.3, rng_state=state)


def check(q, k, v, **arguments) -> None:
    """Gradients of q, k and v are right by the float64 rule."""
    d_o = oracle.randn(*q.shape[:-1], v.shape[-1], dtype=q.dtype, seed=91)
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with oracle.nan_filled_allocations():
        out = attngen.attention(*inputs, **arguments, backend="cuda")
        found = torch.autograd.grad(out, inputs, d_o)
    gradients.check(found, (q, k, v, d_o), None, **arguments)


CALLS = [
    Call("thd", (130, 0, 1, 150), (140, 7, 0, 90), gaps=True, d=64, heads=(4, 2), mask="causal"),
    Call("bshd", (60, 0, 90), (100, 33, 0), room=(100, 110), d=72, d_v=40, window=(50, 20)),
    Call("bshd", (90,), (130,), d=64, loose="apart", mask="causal", more=Features(seen=0.5)),
    Call("bhsd", (70, 70), (90, 90), d=256, dtype="fp16", more=Features("h", dropout=0.3)),
    Call("bshd", (70,), (130,), d=64, more=Features(softcap=3.0, dropout=0.5, positions=(21, 40))),
    Call("bshd", (90,), (140,), d=64, mask="causal", more=Features(bias="pre_scale")),
    Call("bhsd", (70, 70), (131, 131), d=40, more=Features(bias="post_scale", bias_shape="1h1s")),
    Call(
        *("thd", (70, 33), (90, 140)), d=64, heads=(2, 1), mask="causal",
        more=Features(bias="pre_scale", bias_shape="11ss", softcap=3.0, dropout=0.3, seen=0.5),
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_mma_backward_of_varying_calls_is_right(call):
    check_varying(call)


@pytest.mark.parametrize("dim", [256, 52])
def test_mma_backward_of_parts_of_keys_sums_up(dim):
    """Head dims are those whose other kernels keep no such sums."""
    _, length, parts, given = test_backward_parts.CASES[0]
    test_backward_parts.test_parts_sum_up_to_one_call(dim, length, parts, given)


@pytest.mark.parametrize(
    ("d", "d_v", "lengths", "shape"),
    [
        (64, 64, (70, 201), (2, 70, 201)),
        (128, 72, (130, 77), (130, 77)),
        (128, 128, (130, 100), (1, 100)),
        (96, 96, (33, 203), (2, 1, 203)),
        (256, 256, (70, 136), (70, 136)),
    ],
    ids=str,
)
def test_mma_kernels_read_biases_within_their_memory(d, d_v, lengths, shape):
    """Each operand is all that there is to its memory, whose last bytes are of a cut chunk."""
    operands = oracle.operands(1, 2, 1, *lengths, d, d_v)
    bias = oracle.randn(*shape, seed=9)
    for memory in hostile.memories():
        leaves = [memory.copy(x).requires_grad_() for x in (*operands, bias)]
        with hostile.allocating(memory):
            out = attngen.attention(*leaves[:3], bias=leaves[3], backend="cuda")
            found = torch.autograd.grad(out, leaves, memory.copy(out.detach()))
        memory.check()
        oracle.check(out.detach(), None, oracle.truth(*operands, bias=bias))
        assert not any(x.isnan().any() for x in found)
