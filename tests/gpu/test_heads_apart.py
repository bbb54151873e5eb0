"""Key tiles of each query head, which add to dK and dV of the head that it shares, or of all of a
group: gradients are right either way."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attngen
import attngen.frontends.pytorch.backward  # noqa: F401  # defines the operation
from attngen.call import kernel_choice

from . import cases, gradients, oracle, varlen
from .varlen import Call, Features

pytestmark = [pytest.mark.gpu, pytest.mark.wgmma]
CALLS = [
    # Layouts, and one tensor of keys and values; groups of 2, 3 and 8, and one for all heads.
    Call("bshd", (130,) * 2, (200,) * 2, d=64, heads=(4, 2), mask="causal"),
    Call("sbhd", (200,) * 2, (257,) * 2, d=128, heads=(6, 2)),
    Call("bhsd", (200,), (333,), d=128, heads=(8, 1), mask="causal", dtype="fp16"),
    Call("bshd_bs2hd", (130,) * 2, (333,) * 2, d=64, heads=(6, 2), mask="causal_bottom_right"),
    Call("bshd_bsh2d", (130,) * 2, (129,) * 2, d=128, heads=(4, 2), mask="causal"),
    Call("sbhd_sb2hd", (130,) * 2, (200,) * 2, d=96, heads=(4, 2)),
    # Head dims whose accumulators are of other sizes, or of two.
    Call("bshd", (70,), (200,), d=96, heads=(4, 2), mask="causal"),
    Call("bshd", (130,), (200,), d=80, heads=(3, 1)),
    Call("bshd", (130,), (200,), d=32, heads=(4, 2), mask="causal", dtype="fp16"),
    Call("sbhd", (130,), (200,), d=64, d_v=40, heads=(6, 2)),
    Call("bhsd", (130,), (200,), d=128, d_v=72, heads=(4, 1), mask="causal"),
    Call("bshd", (130,), (200,), d=8, d_v=24, heads=(4, 2), mask="causal"),
    # Keys that fill tiles, halves of them, or neither; that no query sees; queries that see none.
    Call("bshd", (200,), (64,), d=64, heads=(4, 2)),
    Call("bshd", (130,), (65,), d=128, heads=(4, 1), mask="causal"),
    Call("bshd", (130,), (256,), d=64, heads=(8, 1), mask="causal_bottom_right"),
    Call("bshd", (70,), (400,), d=64, heads=(4, 2), mask="causal"),
    Call("bhsd", (70,), (300,), d=128, heads=(3, 1), mask="causal"),
    Call("bshd", (300,), (70,), d=128, heads=(4, 2), mask="causal_bottom_right"),
    Call("bshd", (1,), (1,), d=64, heads=(8, 1)),
    Call("bshd", (1,), (300,), d=128, heads=(8, 2), mask="causal_bottom_right"),
    # Tiles enough for the other order of these.
    Call("bshd", (64,), (2050,), d=64, heads=(4, 2), mask="causal_bottom_right"),
    # What else changes scores and weights.
    Call("bshd", (130,), (200,), d=128, heads=(4, 2), mask="causal", more=Features(dropout=0.2)),
    Call("sbhd", (130,) * 2, (200,) * 2, d=64, heads=(4, 2), mask="causal",
         more=Features("bh", softmax="learnable")),
    Call("bshd", (130,), (200,), d=128, heads=(8, 2),
         more=Features(softcap=1.5, softmax="off_by_one")),
    Call("bshd", (130,), (200,), d=16, heads=(6, 2), more=Features("h", seen=0.3)),
    Call("bshd", (130,), (200,), d=96, heads=(6, 3), mask="causal",
         more=Features("h", 1.5, "learnable", 0.1)),
]  # fmt: skip
# Lengths that vary: packed, with rows of no sequence or none, of no keys or queries; padded.
LENGTHS = [
    Call("thd", (130, 0, 7), (70, 9, 200), gaps=True, d=64, heads=(4, 2), mask="causal"),
    Call("thd", (64, 200, 129), (300, 128, 1), d=128, heads=(6, 2)),
    Call("thd", (1, 130, 257), (1, 130, 257), gaps=True, d=128, heads=(8, 1), mask="causal"),
    Call("thd", (100,) * 40, (70, 130) * 20, d=64, heads=(4, 2), mask="causal"),
    Call("thd", (30, 64), (0, 200), d=96, d_v=72, heads=(3, 1), mask="causal_bottom_right"),
    Call("thd_th2d", (130, 65), (130, 65), d=64, heads=(4, 2), mask="causal"),
    Call("bshd", (130, 1, 70), (200, 64, 0), (150, 290), d=128, heads=(4, 1), mask="causal"),
    Call("sbhd", (130, 70), (257, 100), (130, 300), d=64, heads=(6, 2)),
    Call("thd", (130, 200), (200, 300), d=128, heads=(4, 2), mask="causal",
         more=Features("h", softmax="learnable")),
    Call("thd", (130, 200), (200, 300), d=128, heads=(4, 2), mask="causal",
         more=Features(dropout=0.2)),
]  # fmt: skip
# Windows, narrow and wide; of rows that see no key, and beside lengths.
WINDOWS = [
    Call("bshd", (130,), (200,), d=64, heads=(4, 2), mask="causal", window=(50, 0)),
    Call("bshd", (300,), (400,), d=128, heads=(8, 1), window=(70, 30)),
    Call("bshd", (700,), (1400,), d=128, heads=(4, 1), mask="causal_bottom_right",
         window=(1100, 0)),
    Call("sbhd", (300,), (100,), d=64, heads=(6, 2), mask="causal", window=(20, 0)),
    Call("thd", (130, 0, 300), (130, 9, 300), gaps=True, d=128, heads=(4, 2), mask="causal",
         window=(65, 0)),
]  # fmt: skip
# Nothing of which is summed in memory.
OTHERS = [
    Call("thd", (130, 200), (200, 300), d=128, heads=(4, 2), more=Features("h", 1.5)),
    Call("bshd", (130,), (200,), d=67, heads=(4, 2), mask="causal"),
    Call("bshd", (130,), (200,), d=64, heads=(4, 2), more=Features(dropout=0.2)),
    Call("bshd", (130,), (200,), d=128, heads=(4, 2), more=Features(dropout=0.2, seen=0.5)),
    Call("bshd", (130,), (200,), d=64, heads=(4, 2), mask="causal", window=(50, 0),
         more=Features("h")),
    Call("bshd", (130,), (200,), d=128, heads=(4, 2), more=Features(bias="post_scale")),
    Call("bshd", (130,), (200,), d=192, d_v=128, heads=(4, 2), mask="causal"),
    Call("bshd", (130,), (200,), d=64, heads=(2, 2), mask="causal"),
]  # fmt: skip
MANY = Call("bshd", (64,), (130,), d=128, heads=(80, 8), mask="causal_bottom_right")
ORDERED = [
    MANY,
    *(CALLS[n] for n in (0, 1, 2, 3, 9, 16, 17, 20, 21, 22)),
    *(LENGTHS[n] for n in (0, 2, 3)),
]
KERNELS = list(dict.fromkeys([
    *(call.spec for call in (*CALLS, *LENGTHS, *WINDOWS, *OTHERS, MANY)),
    *(dataclasses.replace(call.spec, deterministic=True) for call in ORDERED),
    *cases.core_specs(64, 128, kinds=("none", "causal")),
]))  # fmt: skip
APART = pytest.mark.parametrize("apart", [False, True], ids=("together", "apart"))


def check_call(call, apart, **arguments):
    """The rule of a call whose kernels can have it either way."""
    with oracle.heads_apart(apart) as asked:
        varlen.check(call, **arguments)
    assert asked.called


@APART
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_heads_of_a_group_have_right_gradients(call, apart):
    check_call(call, apart)


@APART
@pytest.mark.parametrize("call", LENGTHS, ids=str)
def test_heads_of_a_group_beside_lengths_have_right_gradients(call, apart):
    check_call(call, apart)


@APART
@pytest.mark.parametrize("call", WINDOWS, ids=str)
def test_heads_of_a_group_under_windows_have_right_gradients(call, apart):
    check_call(call, apart)


def test_kernels_of_an_earlier_version_have_heads_together(monkeypatch):
    find = kernel_choice.find_kernels

    def without_sums(binary):
        return dataclasses.replace(binary, kernel=dataclasses.replace(binary.kernel, dkv_floats=0))

    def find_earlier(*arguments):
        return tuple((without_sums(binary), cubin) for binary, cubin in find(*arguments))

    monkeypatch.setattr(kernel_choice, "find_kernels", find_earlier)
    monkeypatch.setattr(kernel_choice, "_kernels", {})
    check_call(CALLS[0], True)


@pytest.mark.parametrize("call", OTHERS, ids=str)
def test_heads_of_a_call_that_sums_nothing_have_right_gradients(call):
    with oracle.heads_apart(True) as asked:
        varlen.check(call)
    assert not asked.called


@APART
@pytest.mark.parametrize("call", ORDERED, ids=str)
def test_heads_of_a_group_in_an_order_have_right_and_equal_bits(call, apart):
    check_call(call, apart, deterministic=True)


@APART
def test_heads_of_more_tiles_than_ctas_have_right_gradients(apart):
    """One CTA works on tiles of several query heads, one after another."""
    check_call(MANY, apart)


def operands(d=64, heads=(2, 4, 2), lengths=(130, 200), seed=0):
    """q, k, v and d_o."""
    q, k, v = oracle.operands(*heads, *lengths, d, seed=seed)
    return q, k, v, oracle.randn(*q.shape, seed=seed + 50)


def check(q, k, v, d_o, mask="causal"):
    """Runs both directions and asserts the rule, of operands that lie anyhow."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attngen.attention(*leaves, mask=mask, backend="cuda", deterministic=False)
    found = torch.autograd.grad(out, leaves, d_o)
    gradients.check(found, [x.contiguous() for x in (q, k, v, d_o)], None, mask=mask)


@pytest.mark.parametrize("heads", [(2, 4, 2), (1, 8, 1)], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_heads_apart_called_again_and_again_start_from_zero(d, heads):
    """Memory that is handed out again holds the sums of the call before, or NaN."""
    tensors = operands(d, heads)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    with oracle.heads_apart(True) as asked:
        out = attngen.attention(*leaves, mask="causal", backend="cuda", deterministic=False)
        for seed in range(4):
            d_o = oracle.randn(*out.shape, seed=seed)
            if seed % 2:
                found = torch.autograd.grad(out, leaves, d_o, retain_graph=True)
            else:
                with oracle.nan_filled_allocations():
                    found = torch.autograd.grad(out, leaves, d_o, retain_graph=True)
            gradients.check(found, (*(x.detach() for x in leaves), d_o), None, mask="causal")
    assert asked.call_count == 1


def test_heads_apart_of_calls_in_turn_do_not_meet():
    """Calls of other sizes have workspaces that are laid out otherwise."""
    given = [operands(d, heads, lengths) for d, heads, lengths in (
        (64, (2, 4, 2), (130, 200)), (128, (1, 8, 1), (70, 130)), (64, (1, 6, 2), (200, 70))
    )]  # fmt: skip
    with oracle.heads_apart(True) as asked, oracle.nan_filled_allocations():
        for tensors in given * 2:
            check(*tensors)
    assert asked.call_count == len(given)


def laid_out():
    """Keys, values and output gradients that are parts of others, or lie in another order."""
    q, k, v, d_o = operands()
    one, pair = oracle.randn(2, 200, 4, 64, seed=8), oracle.randn(2, 200, 2, 128, seed=9)
    outside = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    around = gradients.Surrounded({"q": q, "k": k, "v": v, "d_o": d_o}).views
    return {
        "in buffers": (around["q"], around["k"], around["v"], around["d_o"]),
        "heads of one": (q, one[:, :, :2], one[:, :, 2:], d_o),
        "columns of one": (q, pair[..., :64], pair[..., 64:], d_o),
        "every other head": (q, one[:, :, ::2], one[:, :, 1::2], d_o),
        "one head for all": (q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), d_o),
        "one sequence for all": (q, k[:1].expand_as(k), v[:1].expand_as(v), d_o),
        "heads outside": (q, *outside, d_o),
        "a number": (q, k, v, torch.ones((), dtype=q.dtype, device=q.device).expand(d_o.shape)),
    }


@pytest.mark.parametrize("how", [
    *("in buffers", "heads of one", "columns of one", "every other head", "one head for all"),
    *("one sequence for all", "heads outside", "a number"),
])  # fmt: skip
def test_heads_apart_of_operands_that_lie_anyhow_have_right_gradients(how):
    with oracle.heads_apart(True) as asked, oracle.nan_filled_allocations():
        check(*laid_out()[how])
    assert asked.called


def test_heads_apart_of_one_tensor_as_keys_and_values_have_right_gradients():
    q, k, _, d_o = operands()
    leaves = [x.requires_grad_() for x in (q, k)]
    with oracle.heads_apart(True) as asked, oracle.nan_filled_allocations():
        out = attngen.attention(q, k, k, mask="causal", backend="cuda", deterministic=False)
        dq, both = torch.autograd.grad(out, leaves, d_o)
        same = [k.detach().clone().requires_grad_() for _ in range(2)]
        out = attngen.attention(q, *same, mask="causal", backend="cuda", deterministic=False)
        found = torch.autograd.grad(out, (q, *same), d_o)
    assert asked.called
    gradients.check(found, (q.detach(), k.detach(), k.detach(), d_o), None, mask="causal")
    torch.testing.assert_close(both, found[1] + found[2], rtol=0.02, atol=0.02)
    torch.testing.assert_close(dq, found[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_heads_of_a_call_that_wants_some_gradients_are_together(mask):
    """And no call that wants others is taken for it."""
    q, k, v, d_o = operands()
    dlse = oracle.randn(2, 4, 130, dtype=torch.float32, seed=3)
    out, aux = attngen.attention(q, k, v, mask=mask, backend="cuda", return_lse=True)
    given = (d_o, dlse, q, k, v, out, aux.lse)
    with oracle.heads_apart(True) as asked, oracle.nan_filled_allocations():
        for wants in ((True, True), (True, False), (False, True), (True, True)):
            of_q, of_kv = wants
            found = torch.ops.attngen.backward(*given, mask=mask, want_dq=of_q, want_dkv=of_kv)
            dq, dk, dv, *_ = found
            kept = (dq if of_q else None, dk if of_kv else None, dv if of_kv else None)
            assert [x.numel() > 0 for x in found[:3]] == [of_q, of_kv, of_kv]
            gradients.check(kept, (q, k, v, d_o), dlse, mask=mask)
    assert asked.call_count == 1


@pytest.mark.parametrize(
    ("heads", "lengths"),
    [((0, 4, 2), (130, 200)), ((2, 4, 2), (0, 200)), ((2, 4, 2), (130, 0)), ((2, 4, 2), (0, 0))],
    ids=str,
)
def test_heads_of_a_call_of_nothing_have_no_gradients(heads, lengths):
    q, k, v, d_o = operands(64, heads, lengths)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with oracle.heads_apart(True) as asked, oracle.nan_filled_allocations():
        out = attngen.attention(*leaves, mask="causal", backend="cuda", deterministic=False)
        found = torch.autograd.grad(out, leaves, d_o)
    assert not asked.called
    for gradient, leaf in zip(found, leaves, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


def attend(q, k, v):
    return attngen.attention(q, k, v, mask="causal", backend="cuda", deterministic=False)


def by_vjp(q, k, v, d_o):
    return torch.func.vjp(attend, q, k, v)[1](d_o)


def mapped(q, k, v, d_o):
    twice = (torch.stack((x, x)) for x in (q, k, v, d_o))
    return [x[1] for x in torch.func.vmap(by_vjp)(*twice)]


def compiled(q, k, v, d_o):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
    return torch.autograd.grad(out, leaves, d_o)


def batched(q, k, v, d_o):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    several = torch.stack((d_o + 1, d_o))
    found = torch.autograd.grad(attend(*leaves), leaves, several, is_grads_batched=True)
    return [x[1] for x in found]


@pytest.mark.parametrize("way", [by_vjp, mapped, compiled, batched])
def test_heads_apart_under_transforms_have_right_gradients(way):
    tensors = operands()
    with oracle.heads_apart(True) as asked, oracle.nan_filled_allocations():
        found = way(*tensors)
    assert asked.called
    gradients.check(found, tensors, None, mask="causal")


@pytest.mark.device
@pytest.mark.parametrize("d", [64, 128])
def test_heads_apart_in_a_graph_start_from_zero_at_every_replay(d):
    tensors = operands(d, (1, 8, 1), (700, 900))
    leaves = [x.requires_grad_() for x in tensors[:3]]
    static = [*leaves, tensors[3]]
    with oracle.heads_apart(True) as asked:

        def step():
            return torch.autograd.grad(attend(*leaves), leaves, static[3])

        graph, found = oracle.capture(step)
        for seed in range(4):
            with torch.no_grad():
                fresh = operands(d, (1, 8, 1), (700, 900), seed)
                for held, new in zip(static, fresh, strict=True):
                    held.copy_(new)
            graph.replay()
            gradients.check(found, fresh, None, mask="causal")
    assert asked.called


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_heads_of_a_long_sequence_are_right_as_they_are_chosen(d, mask):
    check(*operands(d, (1, 8, 1), (2000, 2100)), mask=mask)


@pytest.mark.device
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_heads_of_long_packed_sequences_are_right_as_they_are_chosen(d, mask):
    varlen.check(Call("thd", (1000, 1500), (1100, 1400), d=d, heads=(8, 1), mask=mask))
