"""Arbitrary masks on the kernels: outputs and gradients against float64, empty rows, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attngen
from attngen import AttentionSpec, SpecError

from . import gradients, oracle, oracle_fp8
from .cases import DTYPES

pytestmark = pytest.mark.gpu
# head dims, mask, window, dtype, heads, lengths, layout, the mask's broadcast, dropout
CASES = [
    ((128, 128), "arbitrary", (-1, -1), "bf16", (2, 4, 2), (200, 333), "bshd", "bhss", 0.0),
    ((128, 128), "causal", (-1, -1), "bf16", (1, 4, 4), (333, 200), "sbhd", "1hss", 0.0),
    ((128, 128), "none", (40, 20), "fp16", (2, 2, 1), (300, 257), "bhsd", "11ss", 0.0),
    ((128, 128), "causal_bottom_right", (-1, -1), "bf16", (2, 4, 2), (130, 513), "bshd", "b1ss",
     0.1),
    ((64, 64), "arbitrary", (-1, -1), "bf16", (2, 6, 2), (513, 700), "bshd", "b1ss", 0.0),
    ((64, 64), "causal", (-1, -1), "bf16", (2, 4, 1), (257, 257), "bhsd", "bhss", 0.2),
    ((256, 256), "causal", (-1, -1), "bf16", (2, 4, 2), (257, 300), "bshd", "1hss", 0.0),
    ((256, 256), "arbitrary", (-1, -1), "fp16", (1, 2, 1), (130, 200), "sbhd", "11ss", 0.3),
    ((192, 128), "arbitrary", (-1, -1), "bf16", (2, 4, 1), (333, 333), "bshd", "b11s", 0.0),
    ((80, 80), "none", (-1, 30), "bf16", (1, 3, 1), (1, 300), "bshd", "111s", 0.0),
    ((40, 24), "arbitrary", (-1, -1), "fp16", (2, 2, 2), (300, 77), "bshd", "b1s1", 0.0),
]  # fmt: skip
# The same in FP8, without dropout.
FP8_CASES = [
    ((128, 128), "none", (-1, -1), "e4m3", (2, 4, 2), (200, 333), "bshd", "bhss", 0.0),
    ((128, 128), "causal", (-1, -1), "e4m3", (1, 4, 4), (333, 200), "sbhd", "1hss", 0.0),
    ((64, 64), "none", (40, 20), "e5m2", (2, 2, 1), (300, 257), "bhsd", "11ss", 0.0),
    ((256, 256), "causal", (-1, -1), "e4m3", (1, 2, 1), (130, 200), "bshd", "b1ss", 0.0),
    ((80, 48), "arbitrary", (-1, -1), "e4m3", (2, 2, 2), (300, 77), "bshd", "b1s1", 0.0),
]
IDS = [f"d{c[0][0]}x{c[0][1]}-{c[1]}-{c[3]}-s{c[5][0]}x{c[5][1]}-{c[7]}-p{c[8]}" for c in CASES]
EACH = pytest.mark.parametrize("case", CASES, ids=IDS)


def spec_of(case, direction="fwd", deterministic=False) -> AttentionSpec:
    (d, d_v), mask, window, dtype, *_, dropout = case
    return AttentionSpec(
        head_dim=d, head_dim_v=d_v, dtype=dtype, mask=mask.removesuffix("_bottom_right"),
        window=max(window) >= 0, attn_mask=True, dropout=dropout > 0, directions=(direction,),
        kv_dtype=dtype, out_dtype=dtype, deterministic=deterministic,
    )  # fmt: skip


KERNELS = [
    *(replace(spec_of(case), out_dtype="bf16") for case in FP8_CASES),
    *(spec_of(case, direction) for case in CASES for direction in ("fwd", "bwd")),
    *(spec_of(case, "bwd", True) for case in (CASES[0], CASES[4])),
]


def random_mask(shape, heads, lengths, seed=5, share=0.5):
    """A mask of the broadcast `shape`; some whole tiles are hidden, some shown."""
    full = dict(zip("bhsk", (heads[0], heads[1], *lengths), strict=True))
    sizes = [full[axis] if letter != "1" else 1 for axis, letter in zip("bhsk", shape, strict=True)]
    generator = torch.Generator(oracle.DEVICE).manual_seed(seed)
    mask = torch.rand(sizes, generator=generator, device=oracle.DEVICE) < share
    if min(sizes[2:]) > 64:
        mask[..., :64, 64:] = False
        mask[..., 64:130, :128] = True
    return mask


def given(case):
    """q, k, v and the keyword arguments of a case."""
    (d, d_v), mask, window, dtype, heads, lengths, layout, shape, dropout = case
    if dtype in DTYPES:
        q, k, v = oracle.operands(*heads, *lengths, d, d_v, DTYPES[dtype], layout)
    else:
        sizes = (*heads, *lengths, d, d_v)
        q, k, v = oracle_fp8.operands(*sizes, layout=layout, dtype=dtype)
    arguments = {"mask": mask, "window": window, "layout": layout}
    arguments["attn_mask"] = random_mask(shape, heads, lengths)
    if dropout:
        arguments |= {"dropout_p": dropout, "rng_state": torch.tensor([3, 9], device=oracle.DEVICE)}
    return (q, k, v), arguments


@EACH
def test_forward_with_a_mask_is_right(case):
    tensors, arguments = given(case)
    oracle.check_call(*tensors, **arguments)


@pytest.mark.parametrize("case", FP8_CASES, ids=[f"d{x[0][0]}-{x[1]}-{x[7]}" for x in FP8_CASES])
def test_fp8_forward_with_a_mask_is_right(case):
    tensors, arguments = given(case)
    oracle_fp8.check_call(*tensors, **arguments)


@EACH
def test_gradients_with_a_mask_are_those_of_float64(case):
    check_gradients(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_gradients_with_a_mask_deterministic_repeat_bit_for_bit(case):
    first = check_gradients(case, deterministic=True)
    for _ in range(3):
        assert oracle.same(check_gradients(case, deterministic=True), first)


def check_gradients(case, **more):
    """Gradients by autograd, of output and LSE, held to the rule."""
    tensors, arguments = given(case)
    tensors = [x.requires_grad_() for x in tensors]
    out, aux = attngen.attention(*tensors, **arguments, **more, backend="cuda", return_lse=True)
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=100)
    dlse = oracle.randn(*aux.lse.shape, dtype=torch.float32, seed=7)
    dlse = torch.where(aux.lse.isfinite(), dlse, 0)
    found = torch.autograd.grad([out, aux.lse], tensors, [d_o, dlse])
    gradients.check(found, [*tensors, d_o], dlse, **arguments)
    return found


@pytest.mark.parametrize("d", [64, 128, 256])
def test_mask_that_shows_all_or_nothing_is_right_or_zero(d):
    q, k, v = (x.requires_grad_() for x in oracle.operands(2, 4, 2, 200, 300, d))
    everything = torch.ones(1, 1, 200, 300, dtype=torch.bool, device=oracle.DEVICE)
    oracle.check_call(q.detach(), k.detach(), v.detach(), attn_mask=everything)
    hidden, aux = attngen.attention(q, k, v, attn_mask=~everything, backend="cuda", return_lse=True)
    assert not hidden.any() and torch.isneginf(aux.lse).all()
    assert not any(x.any() for x in torch.autograd.grad(hidden.sum(), (q, k, v)))


@pytest.mark.device
def test_graph_replay_follows_a_mask_that_changes():
    (q, k, v), arguments = given(CASES[0])
    mask = arguments.pop("attn_mask")
    tensors = [x.requires_grad_() for x in (q, k, v)]

    def run():
        out = attngen.attention(
            *tensors, **arguments, attn_mask=mask, backend="cuda", deterministic=True
        )
        return out, *torch.autograd.grad(out.sum(), tensors)

    graph, found = oracle.capture(run)
    for seed in range(3):
        mask.copy_(random_mask("bhss", (2, 4, 2), (200, 333), seed))
        graph.replay()
        assert oracle.same(found, run())


def test_compiled_call_takes_its_mask():
    tensors, arguments = given(CASES[1])
    call = torch.compile(
        lambda q, k, v: attngen.attention(q, k, v, **arguments, backend="cuda") * 2,
        backend="aot_eager",
        fullgraph=True,
    )
    expected = attngen.attention(*tensors, **arguments, backend="cuda") * 2
    assert torch.equal(call(*tensors), expected)


@pytest.mark.device
def test_mask_past_two_to_the_31_elements_is_right_in_its_last_rows_and_columns():
    length, rows = 50_000, 40
    q, k, v = (x.requires_grad_() for x in oracle.operands(1, 2, 1, length, length, 64))
    mask = torch.ones(length, length, dtype=torch.bool, device=oracle.DEVICE)
    mask[:, : length // 2] = torch.rand(length, length // 2, device=oracle.DEVICE) > 0.5
    mask[:-rows, -rows:] = False  # only the last queries see the last keys
    assert mask.numel() > 1 << 31
    out, aux = attngen.attention(q, k, v, attn_mask=mask, backend="cuda", return_lse=True)
    d_o = oracle.randn(*out.shape, seed=5)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_o)
    some = (q.detach()[:, -rows:], k.detach(), v.detach(), d_o[:, -rows:])
    part = {"attn_mask": mask[-rows:]}
    oracle.check(out.detach()[:, -rows:], aux.lse[..., -rows:], oracle.truth(*some[:3], **part))
    truth, rounded = (
        gradients.reference_gradients(some, None, dtype, **part)[2]
        for dtype in (torch.float64, q.dtype)
    )
    found = (dq[:, -rows:], dk[:, -rows:], dv[:, -rows:])
    last = [(x[0], x[1][:, -rows:], x[2][:, -rows:]) for x in (truth, rounded)]
    gradients.check_against(found, *last)


def test_op_mask_that_does_not_fit_is_refused():
    q, k, v = oracle.operands(2, 2, 2, 64, 64, 64)
    for wrong in (torch.ones(2, 2, 64, 63), torch.ones(3, 1, 64, 64), torch.ones(1, 2, 2, 64, 64)):
        with pytest.raises(SpecError, match="attn_mask needs bool"):
            torch.ops.attngen.forward(q, k, v, attn_mask=wrong.bool().to(oracle.DEVICE))
    with pytest.raises(SpecError, match="attn_mask needs bool"):
        torch.ops.attngen.forward(q, k, v, attn_mask=torch.ones(64, 64, device=oracle.DEVICE))
    with pytest.raises(SpecError, match="needs attn_mask"):
        torch.ops.attngen.forward(q, k, v, mask="arbitrary")
