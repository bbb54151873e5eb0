"""The forward by products of warps against float64: on Hopper its kernels built for sm_90, on any
other chip that has kernels those of its own architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import attngen
from attngen.targets.target import TARGETS
from tests.support.caches import kernels_of

from . import cases, kv_cache, oracle, test_forward_onto, test_parallel, variants
from .cases import Case
from .conftest import any_chip
from .test_coverage import MEMBERS
from .test_decode import cache, queries
from .test_decode import check as check_pages
from .variants import Variant
from .varlen import Call, loosen

pytestmark = pytest.mark.gpu
ARCH = any_chip() or "sm_90"


@pytest.fixture(autouse=True, scope="module")
def forced() -> Iterator[None]:
    """Calls run kernels of this target."""
    with kernels_of(ARCH) as launched:
        yield
    backward, few = {"bwd_clear", "mma_bwd", "bwd_convert"}, {"mma_decode", "combine"}
    assert "mma_fwd" in launched <= {"mma_fwd", "mask_pack"} | backward | few


def check(q, k, v, **arguments) -> None:
    """A call on memory full of NaN is right by the float64 rule."""
    expected = oracle.truth(q, k, v, **arguments)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    oracle.check(out, aux.lse, expected, arguments.get("layout", "bshd"))


def integers(**values: list[int]) -> dict[str, torch.Tensor]:
    """Lengths, or places, on the device."""
    return {
        name: torch.tensor(each, dtype=torch.int32, device=oracle.DEVICE)
        for name, each in values.items()
    }


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_mma_forward_of_ragged_lengths_is_right(d, mask):
    """Rows that see no key are among them."""
    for s_q, s_kv in ((130, 150), (65, 200), (100, 40)):
        check(*oracle.operands(1, 2, 1, s_q, s_kv, d), mask=mask)


CASES = [
    Case(72, 40, "bf16", "causal", (40, 0), None, (1, 4, 2), (130, 200), "sbhd"),
    Case(256, 256, "fp16", "causal", (-1, -1), True, (1, 2, 1), (70, 130), "bhsd"),
    Case(96, 192, "fp16", "none", (50, 20), True, (1, 2, 2), (90, 120)),
    Case(192, 128, "bf16", "none", (-1, 30), None, (1, 2, 2), (65, 127)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma_forward_of_any_head_dims_and_windows_is_right(case):
    check(*case.operands(), **case.arguments)


VARIANTS = [
    Variant(cases.every_mask()[9], "bh", "learnable", max_logit=True),
    Variant(cases.every_mask()[40], "h", "off_by_one", softcap=3.0, max_logit=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mma_forward_with_scores_sinks_and_maxima_is_right(variant):
    variants.check_forward(variant)


@pytest.mark.parametrize("d", [64, 128])
def test_mma_forward_drops_what_the_reference_drops(d):
    q, k, v = oracle.operands(2, 2, 1, 70, 130, d)
    state = torch.tensor([5, 9], device=oracle.DEVICE)
    check(q, k, v, mask="causal", dropout_p=0.3, rng_state=state)


def test_mma_forward_under_an_arbitrary_mask_is_right():
    q, k, v = oracle.operands(2, 2, 1, 70, 130, 64)
    seen = oracle.randn(2, 1, 70, 130, dtype=torch.float32, seed=3) > 0
    seen[:, :, 5] = False
    check(q, k, v, attn_mask=seen, window=(100, 20))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_mma_forward_of_used_lengths_fills_other_rows(mask):
    q, k, v = oracle.operands(3, 2, 1, 140, 90, 64)
    used = integers(seqused_q=[140, 0, 33], seqused_kv=[90, 50, 7])
    check(q, k, v, mask=mask, **used)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_mma_forward_of_packed_sequences_is_right(mask):
    q, k, v = (x[0] for x in oracle.operands(1, 4, 2, 300, 260, 128))
    ends = integers(cu_seqlens_q=[0, 130, 130, 290], cu_seqlens_kv=[0, 60, 200, 260])
    check(q, k, v, layout="thd", mask=mask, **ends)


@pytest.mark.parametrize("place", ["odd", "pairs", "apart"])
def test_mma_forward_of_rows_that_begin_anywhere_is_right(place):
    """By an element or two, or with the columns of a head apart."""
    if place == "apart":
        found = oracle.operands(1, 33, 33, 90, 70, 2, 2)
        q, k, v = (x.transpose(2, 3) for x in found)
    else:
        skipped = 1 if place == "odd" else 2
        q, k, v = (x[..., skipped:] for x in oracle.operands(2, 2, 1, 90, 140, 68))
    check(q, k, v, mask="causal")


@pytest.mark.parametrize("page", [3, 64])
def test_mma_forward_over_pages_is_right(page):
    check_pages(queries(3, 70, 2, 64), cache([150, 0, 33], 1, 64, page), mask="causal_bottom_right")


@pytest.mark.parametrize("kind", ["pre_scale", "post_scale"])
@pytest.mark.parametrize("sizes", [(2, 1, 90, 140), (1, 2, 1, 140)], ids=str)
def test_mma_forward_with_a_bias_is_right(kind, sizes):
    """With one row for all, too, and rows of 280 bytes, which begin at multiples of 8."""
    q, k, v = oracle.operands(2, 2, 1, 90, 140, 64)
    check(q, k, v, mask="causal", bias=oracle.randn(*sizes, seed=7), bias_type=kind)


def test_mma_forward_returns_float32():
    q, k, v = oracle.operands(1, 2, 1, 70, 130, 64)
    expected = oracle.truth(q, k, v)
    with oracle.nan_filled_allocations():
        out, lse, *_ = torch.ops.attngen.forward(q, k, v, out_dtype="float32")
    assert out.dtype == torch.float32
    oracle.check(out, lse, expected)


def check_varying(call: Call) -> None:
    """A forward of sequences of many lengths, on memory full of NaN, is right by the float64 rule;
    what belongs to none is 0."""
    operands, arguments = call.operands(), call.arguments()
    expected = oracle.truth(*operands, **arguments)
    placed = [None if x is None else loosen(x, call.loose) for x in operands]
    more = {"return_max_logit": call.more.max_logit, "return_lse": True, "backend": "cuda"}
    with oracle.nan_filled_allocations(), torch.no_grad():
        out, aux = attngen.attention(*placed, **arguments, **more)
    oracle.check(out, aux.lse, expected, call.layout)
    if call.more.max_logit:
        variants.check_max_logit(aux.max_logit, *operands, arguments, False)


SERVED = [
    call
    for member, call in MEMBERS
    if member.dtype != "e4m3" and not (member.spec.widens or member.splits)
]
WIDENED = [(m, call) for m, call in MEMBERS if m.spec.widens and not m.splits]


@pytest.mark.skipif(not TARGETS[ARCH].fp8, reason=f"{ARCH} has no FP8")
@pytest.mark.parametrize(("member", "call"), WIDENED, ids=str)
def test_mma_forward_of_8_bit_keys_and_values_is_right(member, call):
    kv_cache.check_narrowed(call, member.max_logit, None)


@pytest.mark.skipif(not TARGETS[ARCH].fp8, reason=f"{ARCH} has no FP8")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128), (80, 48)], ids=str)
@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
def test_mma_prompt_over_pages_of_8_bits_is_right(kv, dims):
    cached = kv_cache.pages([500, 0, 65], 2, dims[0], 16, dims[1], kv_dtype=kv, scales="head")
    kv_cache.check_pages(queries(3, 130, 4, dims[0]), cached, mask="causal_bottom_right")


@pytest.mark.parametrize("call", SERVED, ids=str)
def test_mma_forward_of_the_covering_set_is_right(call):
    if isinstance(call, Variant):
        variants.check_forward(call)
    else:
        check_varying(call)


def test_mma_forward_is_traced_whole_with_gradients_and_without():
    q, k, v = oracle.operands(1, 2, 1, 70, 130, 64)
    expected = oracle.truth(q, k, v, mask="causal")

    def attend(*operands, backend):
        return attngen.attention(*operands, mask="causal", backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    oracle.check(compiled(q, k, v, backend="cuda"), None, expected)
    q.requires_grad_()
    compiled(q, k, v, backend="auto").sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("dims", [(128, 128), (100, 52)], ids=str)
def test_mma_forward_joins_what_is_there(dims):
    test_forward_onto.test_sums_that_nobody_wants_are_not_written(dims)


@pytest.mark.parametrize(("dims", "given"), test_forward_onto.PACKED[:3], ids=str)
def test_mma_forward_joins_packed_sequences(dims, given):
    test_forward_onto.test_packed_sequences_join_each_on_its_own_diagonal(dims, given)


@pytest.mark.parametrize("case", test_parallel.PACKED[:2], ids=str)
def test_mma_ranks_of_packed_sequences_are_one_call(case):
    test_parallel.test_ranks_of_packed_sequences_are_one_call(*case)


def test_mma_queries_of_a_rank_wait_for_their_keys(monkeypatch):
    test_parallel.test_queries_that_wait_are_one_call(2, 512, monkeypatch)


def test_mma_forward_refuses_what_it_does_not_serve():
    q, k, v = oracle.operands(1, 2, 1, 70, 130, 64)
    bias = oracle.randn(1, 1, 70, 130)
    with pytest.raises(attngen.SpecError, match="split the keys of plain operands"):
        attngen.attention(q, k, v, bias=bias, num_splits=2, backend="cuda")
    check(q, k, v, bias=bias)  # in one part
