"""Dropout on the kernels: the mask bit for bit, outputs and gradients against float64."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen import AttentionSpec, SpecError
from attngen.reference import dropout_keep_mask

from . import gradients, oracle, varlen
from .cases import DTYPES
from .varlen import Call, Features

pytestmark = pytest.mark.gpu
STATE = (0x123456789ABCDEF, 2**40 + 5)
# head dims, mask, window, dtype, heads, lengths, layout, p
CASES = [
    ((128, 128), "causal", (-1, -1), "bf16", (2, 4, 2), (200, 333), "bshd", 0.1),
    ((128, 128), "none", (-1, -1), "bf16", (1, 2, 2), (333, 200), "sbhd", 0.5),
    ((128, 128), "causal_bottom_right", (40, 0), "bf16", (2, 2, 1), (300, 257), "bhsd", 0.3),
    ((64, 64), "causal", (-1, -1), "bf16", (1, 6, 2), (513, 700), "bshd", 0.1),
    ((64, 64), "none", (50, 20), "fp16", (2, 3, 3), (129, 65), "sbhd", 0.9),
    ((256, 256), "causal", (-1, -1), "bf16", (1, 4, 2), (257, 300), "bshd", 0.2),
    ((192, 128), "causal", (-1, -1), "bf16", (2, 4, 1), (333, 333), "bshd", 0.1),
    ((80, 80), "none", (-1, -1), "fp16", (1, 3, 1), (1, 300), "bshd", 0.25),
    ((40, 24), "causal_bottom_right", (-1, -1), "bf16", (2, 2, 2), (300, 77), "bshd", 0.4),
    ((248, 248), "none", (30, -1), "bf16", (1, 2, 2), (130, 130), "bhsd", 0.1),
    ((128, 128), "causal", (-1, -1), "bf16", (1, 2, 2), (200, 200), "bshd", 1.0),
    (
        (104, 120),
        "causal",
        (200, 0),
        "bf16",
        (1, 2, 1),
        (400, 400),
        "bshd",
        0.1,
    ),  # 112 keys a block
]
IDS = [f"d{c[0][0]}x{c[0][1]}-{c[1]}-{c[3]}-s{c[5][0]}x{c[5][1]}-p{c[7]}" for c in CASES]
EACH = pytest.mark.parametrize("case", CASES, ids=IDS)
LENGTHS = [
    Call("thd", (130, 0, 1, 257, 64), (300, 7, 0, 300, 129), d=128, heads=(4, 2),
         mask="causal_bottom_right", more=Features(dropout=0.1)),
    Call("bshd", (260, 130, 40), (257, 300, 129), room=(260, 300), d=128, dtype="fp16",
         more=Features(dropout=0.3)),
]  # fmt: skip


def spec_of(case, direction="fwd", deterministic=False) -> AttentionSpec:
    (d, d_v), mask, window, dtype, *_ = case
    return AttentionSpec(
        head_dim=d, head_dim_v=d_v, dtype=dtype, mask=mask.removesuffix("_bottom_right"),
        window=max(window) >= 0, dropout=True, directions=(direction,), kv_dtype=dtype,
        out_dtype=dtype, deterministic=deterministic,
    )  # fmt: skip


KERNELS = [
    *(spec_of(case, direction) for case in CASES for direction in ("fwd", "bwd")),
    *(spec_of(case, "bwd", True) for case in (CASES[0], CASES[3], CASES[5])),
    *(call.spec for call in LENGTHS),
]


def rng_state(device=oracle.DEVICE):
    return torch.tensor(STATE, device=device)


def given(case, seed=0):
    """q, k, v and the keyword arguments of a case."""
    (d, d_v), mask, window, dtype, heads, lengths, layout, p = case
    q, k, v = oracle.operands(*heads, *lengths, d, d_v, DTYPES[dtype], layout, seed)
    arguments = {"mask": mask, "window": window, "layout": layout, "dropout_p": p}
    return (q, k, v), {**arguments, "rng_state": rng_state()}


@EACH
def test_forward_with_dropout_is_right(case):
    tensors, arguments = given(case)
    oracle.check_call(*tensors, **arguments)


@pytest.mark.parametrize("call", LENGTHS, ids=str)
def test_lengths_beside_dropout_are_right(call):
    varlen.check(call)


@EACH
def test_gradients_with_dropout_are_those_of_float64(case):
    check_gradients(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5]], ids=str)
def test_gradients_with_dropout_deterministic_repeat_bit_for_bit(case):
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


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_mask_of_the_kernel_is_the_reference_s_bit_for_bit(d, p):
    """Scores of 0 and one-hot values: the output is the mask."""
    batch, heads, s_q = 3, 5, 300
    q = torch.zeros(batch, s_q, heads, d, dtype=torch.bfloat16, device=oracle.DEVICE)
    k = torch.zeros(batch, d, heads, d, dtype=torch.bfloat16, device=oracle.DEVICE)
    unit = torch.eye(d, dtype=torch.bfloat16, device=oracle.DEVICE)
    v = unit[None, :, None].expand_as(k).contiguous()
    out, aux = attngen.attention(
        q, k, v, dropout_p=p, rng_state=rng_state(), backend="cuda", return_lse=True
    )
    mask = dropout_keep_mask(rng_state(), p, batch, heads, s_q, d)
    assert torch.equal(out.permute(0, 2, 1, 3) > 0, mask)
    assert torch.equal(aux.rng_state, rng_state())


def test_state_is_drawn_from_the_generator_and_returned():
    tensors, arguments = given(CASES[0])
    del arguments["rng_state"]
    arguments["return_rng_state"] = True
    torch.manual_seed(11)
    out, aux = attngen.attention(*tensors, **arguments, backend="cuda")
    other, other_aux = attngen.attention(*tensors, **arguments, backend="cuda")
    assert not torch.equal(aux.rng_state, other_aux.rng_state) and not torch.equal(out, other)
    torch.manual_seed(11)
    again, again_aux = attngen.attention(*tensors, **arguments, backend="cuda")
    assert torch.equal(aux.rng_state, again_aux.rng_state) and torch.equal(out, again)
    replayed, _ = attngen.attention(*tensors, **arguments, rng_state=aux.rng_state, backend="cuda")
    assert torch.equal(out, replayed)


@pytest.mark.device
def test_graph_replays_draw_new_masks_and_gradients_follow():
    tensors, arguments = given(CASES[0])
    del arguments["rng_state"]
    arguments["return_rng_state"] = True
    tensors = [x.requires_grad_() for x in tensors]

    def run():
        out, aux = attngen.attention(*tensors, **arguments, backend="cuda", deterministic=True)
        return out, aux.rng_state, *torch.autograd.grad(out.sum(), tensors)

    graph, (out, state, *found) = oracle.capture(run)
    seen = []
    for _ in range(3):
        graph.replay()
        given_state = {**arguments, "rng_state": state.clone()}
        expected, _ = attngen.attention(*tensors, **given_state, backend="cuda", deterministic=True)
        assert torch.equal(out, expected)
        assert oracle.same(found, torch.autograd.grad(expected.sum(), tensors))
        seen.append(tuple(state.tolist()))
    assert len(set(seen)) == 3


@pytest.mark.slow
def test_compiled_call_drops_what_its_state_says():
    tensors, arguments = given(CASES[0])
    del arguments["rng_state"]
    arguments["return_rng_state"] = True
    tensors = [x.requires_grad_() for x in tensors]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q, k, v):
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda")
        return out * 2, aux.rng_state

    out, state = call(*tensors)
    expected, _ = attngen.attention(*tensors, **arguments, rng_state=state, backend="cuda")
    assert torch.equal(out, expected * 2)
    found = torch.autograd.grad(out.sum(), tensors[2])[0]
    assert torch.allclose(found, torch.autograd.grad((expected * 2).sum(), tensors[2])[0])


def test_op_without_a_state_is_refused():
    q, k, v = oracle.operands(1, 1, 1, 64, 64, 64)
    with pytest.raises(SpecError, match="rng_state"):
        torch.ops.attngen.forward(q, k, v, dropout_p=0.1)
    short = torch.zeros(1, dtype=torch.int64, device=oracle.DEVICE)
    with pytest.raises(SpecError, match="int64 \\[2\\]"):
        torch.ops.attngen.forward(q, k, v, rng_state=short, dropout_p=0.1)


@pytest.mark.parametrize("times", [8, 400])
@pytest.mark.parametrize("case", CASES[:2], ids=IDS[:2])
def test_forward_where_scores_outgrow_maxima_is_right(case, times):
    """Keys are visited from the last on and score ever higher, so that maxima rise."""
    (q, k, v), arguments = given(case)
    axis = arguments["layout"].index("s")
    ramp = torch.linspace(times, 0, k.shape[axis], device=k.device)
    k = (k * ramp.view([-1 if i == axis else 1 for i in range(4)])).to(k.dtype)
    oracle.check_call(q, k, v, **arguments)
