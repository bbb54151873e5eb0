"""Packed tokens (thd) on the kernels: lengths, gaps, alignment, both directions, graphs."""

from __future__ import annotations

import itertools

import pytest
import torch

import attngen

from . import oracle, varlen
from .varlen import Call

pytestmark = pytest.mark.gpu

SHORT = (0, 1, 3, 130, 64, 0, 257, 128, 0)
OTHER = (5, 1, 0, 64, 200, 0, 130, 300, 7)
UNEVEN = (1, 2500, 7, 16, 0, 33, 129)
MANY = 4  # times as many sequences, whose order a kernel before the others finds
MASKS = (
    {"mask": "none"},
    {"mask": "causal"},
    {"mask": "causal_bottom_right"},
    {"mask": "none", "window": (50, 20), "bottom_right": True},
    {"mask": "padding_causal", "window": (40, 0)},
)
CALLS = [
    *(Call("thd", SHORT, lens, gaps=gaps, d=d, heads=(4, 2), **mask)
      for d in (64, 128, 256) for lens, gaps in (((), False), (OTHER, True)) for mask in MASKS),
    *(Call("thd", UNEVEN, d=d, heads=(2, 1), mask="causal") for d in (64, 128, 256)),
    *(Call(name, SHORT, gaps=gaps, d=128, mask="causal")
      for name in ("t3hd", "th3d") for gaps in (False, True)),
    *(Call(name, SHORT, OTHER, gaps=True, d=128, mask="causal", heads=(4, 2))
      for name in ("thd_t2hd", "thd_th2d")),
    *(Call(name, SHORT, (300,) * 9, gaps=gaps, d=d, mask="causal_bottom_right")
      for name in ("thd_bshd_bshd", "thd_sbhd_sbhd") for gaps in (False, True) for d in (128, 256)),
    *(Call(name, SHORT, OTHER, room=(300, 310), d=128, mask="causal")
      for name in ("thd_bshd_bshd", "thd_sbhd_sbhd")),
    Call("thd", SHORT, OTHER, gaps=True, d=192, d_v=128, heads=(2, 2), mask="causal"),
    Call("thd", SHORT, OTHER, gaps=True, d=72, d_v=40, heads=(6, 2), mask="causal"),
    Call("thd", SHORT, d=96, mask="causal", dtype="fp16"),
    Call("thd", (0, 0, 0), gaps=True, d=64),
    Call("thd", (130, 0, 64), (0, 200, 0), gaps=True, d=64),
    Call("thd", (130, 0, 64), (0, 200, 0), gaps=True, d=256),
    Call("thd", (17,) * 1500, d=64, mask="causal"),
    *(Call("thd", MANY * SHORT, MANY * OTHER, gaps=True, d=d, heads=(4, 2), mask="causal")
      for d in (64, 128, 256)),
]  # fmt: skip
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))
KERNELS += [
    attngen.AttentionSpec(head_dim=d, dtype="e4m3", mask="causal", layout=layout, seqused=used)
    for d in (64, 128, 256)
    for layout, used in (("thd", False), ("bshd", True), ("bshd", False))
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_varlen_both_directions_are_right(call):
    varlen.check(call)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
def test_varlen_deterministic_gives_right_and_equal_bits(d):
    call = Call("thd", (700, 0, 1300, 129), gaps=True, d=d, heads=(4, 2), mask="causal")
    varlen.check(call, deterministic=True)
    operands, d_o = call.operands(), call.tensor("q", 4, d, 7)
    dlse = torch.zeros(4, d_o.shape[0], device=oracle.DEVICE)
    first = varlen.run(operands, d_o, dlse, **call.arguments(), deterministic=True)
    for _ in range(5):
        again = varlen.run(operands, d_o, dlse, **call.arguments(), deterministic=True)
        assert oracle.same(first[2], again[2]) and oracle.same(first[:2], again[:2])


@pytest.mark.device
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("d", [64, 256])
def test_varlen_graph_replay_follows_changed_lengths(d, count):
    total, heads = 900, 4
    q, k, v = (oracle.randn(total, heads, d, seed=n).requires_grad_() for n in range(3))
    d_o = oracle.randn(total, heads, d, seed=5)
    lengths = ends(count, 300, 300, 900)
    arguments = {"layout": "thd", "mask": "causal", "backend": "cuda", "deterministic": True}

    def step():
        out = attngen.attention(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **arguments)
        return out, *torch.autograd.grad(out, (q, k, v), d_o)

    graph, found = oracle.capture(step)
    for changed in ((900, 900, 900), (1, 2, 3), (128, 256, 700), (0, 0, 0)):
        lengths.copy_(ends(count, *changed))
        graph.replay()
        assert oracle.same(found, step())


def ends(count, *given):
    """Cumulative lengths of so many sequences, of which the last have none."""
    return varlen.int32((0, *given, *given[-1:] * (count - len(given))))


@pytest.mark.device
def test_varlen_forward_captured_alone_follows_changed_lengths():
    """Without gradients a call reaches its kernels by a shorter way; workspaces are the graph's."""
    q, k, v = (oracle.randn(900, 4, 64, seed=n) for n in range(3))
    lengths = varlen.int32((0, 300, 300, 900))
    arguments = {"layout": "thd", "mask": "causal", "backend": "cuda", "return_lse": True}

    def step():
        given = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, **arguments}
        out, aux = attngen.attention(q, k, v, **given)
        again, _ = attngen.attention(out, k, v, **given)  # its workspace follows the first's
        return out, aux.lse, again

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for changed in ((0, 900, 900, 900), (0, 1, 2, 3), (0, 128, 256, 700), (0, 0, 0, 0)):
        lengths.copy_(varlen.int32(changed))
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        assert oracle.same(found, step())


def layers(call, schedule, count=3):
    """Outputs, LSE and gradients of several layers with the same lengths."""
    found = []
    for seed in range(count):
        operands = [None if x is None else x.requires_grad_() for x in call.operands(seed)]
        out, aux = attngen.attention(
            *operands, **call.arguments(), schedule=schedule, return_lse=True, backend="cuda",
            deterministic=True,
        )  # fmt: skip
        present = [x for x in operands if x is not None]
        d_o = call.tensor("q", call.heads[0], call.d, 7)
        found += [out.detach(), aux.lse.detach(), *torch.autograd.grad(out, present, d_o)]
    return found


class SameLengths(Call):
    """A call whose lengths are the same tensors each time."""

    def arguments(self):
        known = self.__dict__.get("known")
        if known is None:
            known = super().arguments()
            self.__dict__["known"] = known
        return known


@pytest.mark.wgmma
@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_schedule_that_layers_share_gives_the_bits_of_calls_of_their_own(d, layout):
    room = (300, 310) if layout == "bshd" else None
    call = SameLengths(
        layout, MANY * SHORT, MANY * OTHER, room=room, gaps=room is None, d=d, heads=(4, 2),
        mask="causal",
    )  # fmt: skip
    schedule = attngen.Schedule()
    found = layers(call, schedule)
    assert oracle.same(found, layers(call, None)) and oracle.same(found, layers(call, schedule))
    ordered = schedule._table[:, 0, 0] != 0
    assert ordered.tolist() == [True, True, d == 256]  # dQ's queries where it has its own kernel


@pytest.mark.device
def test_schedule_follows_lengths_when_reset_and_in_replays_of_a_graph():
    q, k, v = (oracle.randn(900, 4, 64, seed=n) for n in range(3))
    lengths = ends(40, 300, 300, 900)
    arguments = {"layout": "thd", "mask": "causal", "backend": "cuda"}
    arguments |= {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}

    def step(schedule=None):
        first = attngen.attention(q, k, v, **arguments, schedule=schedule)
        return first, attngen.attention(first, k, v, **arguments, schedule=schedule)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(attngen.Schedule())
    kept = attngen.Schedule()
    for changed in ((300, 300, 900), (900, 900, 900), (128, 256, 700), (0, 0, 0)):
        lengths.copy_(ends(40, *changed))
        graph.replay()
        kept.reset()
        wanted = step()
        assert oracle.same(found, wanted) and oracle.same(step(kept), wanted)


@pytest.mark.slow
def test_varlen_compiled_call_takes_new_token_counts_without_recompiling():
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True)
    def step(q, k, v, lengths):
        out = attngen.attention(
            q, k, v, layout="thd", mask="causal", backend="cuda",
            cu_seqlens_q=lengths, cu_seqlens_kv=lengths, deterministic=True,
        )  # fmt: skip
        return out * 2

    for number, lens in enumerate(((100, 30), (7, 200, 1), (300, 20, 5, 64))):
        call = Call("thd", lens, d=64, mask="causal")
        operands = [x.requires_grad_() for x in call.operands()]
        lengths = call.arguments()["cu_seqlens_q"]
        for tensor in operands:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(lengths, 0)
        out = step(*operands, lengths)
        plain = attngen.attention(*operands, **call.arguments(), backend="cuda", deterministic=True)
        assert torch.equal(out, plain * 2)
        gradients = torch.autograd.grad(out.float().sum(), operands)
        expected = torch.autograd.grad((plain * 2).float().sum(), operands)
        assert oracle.same(gradients, expected)
        assert counter.frame_count == 1, f"compiled anew for call {number}"


@pytest.mark.device
def test_varlen_256k_tokens_beside_thousands_of_short_sequences_give_the_bits_of_each_alone():
    lens = [n % 23 for n in range(1500)] + [1 << 18] + [n % 31 for n in range(1500)]
    starts = [0, *itertools.accumulate(lens)]
    tensors = [oracle.randn(starts[-1], 1, 64, seed=n) for n in range(4)]

    def both(q, k, v, d_o, **given):
        operands = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attngen.attention(
            *operands, mask="causal", backend="cuda", deterministic=True, **given
        )
        return [out.detach(), *torch.autograd.grad(out, operands, d_o)]

    lengths = varlen.int32(starts)
    found = both(*tensors, layout="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    for b in (3, 22, 1500, 1503, 3000):  # of 3, 22, 2^18, 2 and 11 tokens
        rows = slice(starts[b], starts[b + 1])
        length = varlen.int32((0, lens[b]))
        alone = both(
            *(x[rows] for x in tensors), layout="thd", cu_seqlens_q=length, cu_seqlens_kv=length
        )
        assert oracle.same([x[rows] for x in found], alone), f"sequence {b}"


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_varlen_fp8_is_that_of_each_sequence_alone(d, layout):
    room = (300, 300) if layout == "bshd" else None
    shape = {"room": room, "gaps": room is None, "d": d, "heads": (4, 2), "dtype": "e4m3"}
    varlen.check_alone(Call(layout, SHORT, mask="causal", **shape))


def test_varlen_lengths_of_a_wrong_kind_are_refused():
    q = torch.zeros(10, 2, 64, dtype=torch.bfloat16, device=oracle.DEVICE)
    lengths = varlen.int32((0, 4, 10))
    arguments = {"layout": "thd", "backend": "cuda"}
    for given, word in [
        ({}, "cu_seqlens_q"),
        ({"cu_seqlens_q": lengths}, "cu_seqlens_kv"),
        ({"cu_seqlens_q": lengths.short(), "cu_seqlens_kv": lengths}, "int32"),
        ({"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths.to("meta")}, "device"),
        ({"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths[:2]}, "cu_seqlens_kv"),
    ]:
        with pytest.raises(attngen.SpecError, match=word):
            attngen.attention(q, q, q, **given, **arguments)
