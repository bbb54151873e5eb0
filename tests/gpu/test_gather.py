"""Operands that the copy engine cannot read, both directions: any head dim, stride and address."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import oracle, varlen
from .varlen import Call, Features

pytestmark = pytest.mark.gpu

DIMS = (1, 2, 3, 7, 12, 17, 31, 33, 50, 63, 65, 68, 81, 97, 100, 115, 127, 129, 150, 177, 201, 250,
        255)  # fmt: skip
PAIRS = ((68, 12), (5, 200), (129, 64), (64, 30), (250, 100), (33, 128))
LOOSE = ("start1", "start2", "start4", "rows1", "rows2", "rows4", "apart")
UNEVEN = (0, 1, 3, 130, 64, 0, 257, 128, 0)
OTHER = (5, 1, 0, 64, 200, 0, 130, 300, 7)
TURNS = (
    {"mask": "none"},
    {"mask": "causal", "heads": (4, 2)},
    {"mask": "causal_bottom_right", "heads": (3, 1)},
    {"mask": "none", "window": (50, 20)},
)
LAYOUTS = ("bshd", "sbhd", "bhsd", "bs3hd", "bsh3d", "sbhd_sb2hd")


def placed(number: int, **fixed) -> Call:
    """Two dense sequences; layouts and masks turn at different paces."""
    turn, layout = TURNS[number % 4], LAYOUTS[number % 6]
    packed = layout.endswith("3hd") or layout.endswith("3d")
    chosen = {**turn, "heads": (2, 2)} if packed else turn
    if packed:
        return Call(layout, (200, 200), **chosen, **fixed)
    return Call(layout, (130, 130), (200, 200), **chosen, **fixed)


CALLS = [
    *(placed(number, d=d, dtype=("bf16", "fp16")[number // 3 % 2])
      for number, d in enumerate(DIMS)),
    *(Call("bshd", (130,) * 2, (200,) * 2, d=d, d_v=d_v, heads=(4, 2), mask="causal")
      for d, d_v in PAIRS),
    *(placed(number + 2 * turn, d=d, loose=loose)
      for turn, d in enumerate((64, 128, 256)) for number, loose in enumerate(LOOSE)),
    *(Call("thd", UNEVEN, lens, gaps=gaps, d=d, heads=(4, 2), mask="causal")
      for d in (33, 68, 127, 250) for lens, gaps in (((), False), (OTHER, True))),
    Call("thd", UNEVEN, OTHER, gaps=True, d=128, mask="causal", loose="start1"),
    Call("t3hd", UNEVEN, d=68, mask="causal"),
    Call("thd_t2hd", UNEVEN, OTHER, gaps=True, d=100, heads=(4, 2), mask="causal"),
    *(Call("bshd", (0, 1, 130, 64, 200), (7, 0, 130, 300, 129), room=(200, 310), d=d, heads=(4, 2),
           mask="padding_causal", loose=loose)
      for d, loose in ((67, ""), (128, "rows2"), (250, ""))),
    *(Call("bshd", (130,) * 2, (200,) * 2, d=d, heads=(4, 2), mask="causal",
           more=Features("h", 1.5, "learnable", 0.1, 0.5, max_logit=True)) for d in (60, 100, 250)),
    *(Call("sbhd", (130,) * 2, (77,) * 2, d=d, heads=(4, 2), mask=mask, more=Features(
           bias=kind, bias_shape=shape)) for d, mask, kind, shape in (
           (33, "causal", "post_scale", "1hss"), (100, "none", "pre_scale", "bhss"),
           (250, "causal", "post_scale", "111s"))),
]  # fmt: skip
KERNELS = list(dict.fromkeys(call.spec for call in CALLS))


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gather_both_directions_are_right(call):
    varlen.check(call)


@pytest.mark.parametrize("d", [60, 127, 250])
def test_gather_deterministic_gives_right_and_equal_bits(d):
    varlen.check(Call("bshd", (300, 300), d=d, heads=(4, 2), mask="causal"), deterministic=True)


def test_gather_partial_output_is_right():
    q, k, v = oracle.operands(2, 4, 2, 130, 200, 33, 17)
    out, lse, *_ = torch.ops.attngen.forward(q, k, v, mask="causal", out_dtype="float32")
    assert out.dtype == torch.float32
    oracle.check(out, lse, oracle.truth(q, k, v, mask="causal"))


def test_gather_serves_the_call_whose_address_alone_is_odd():
    """Equal shapes and strides: what is remembered of the first call must not serve the second."""
    tensors = oracle.operands(2, 4, 2, 130, 200, 128)
    for how in ("", "start1", "", "start4"):
        placed = [varlen.loosen(x, how) for x in tensors]
        oracle.check_call(*placed, mask="causal")


def test_gather_with_fewer_queries_than_a_tile_is_right():
    q, k, v = oracle.operands(3, 8, 2, 1, 700, 128)
    oracle.check_call(*(varlen.loosen(x, "rows2") for x in (q, k, v)), mask="causal_bottom_right")


@pytest.mark.device
def test_gather_captured_in_a_graph_follows_changed_inputs():
    tensors = oracle.operands(2, 4, 2, 130, 200, 67)
    oracle.run(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = oracle.run(tensors)
    for seed in range(1, 4):
        for tensor, fresh in zip(
            tensors, oracle.operands(2, 4, 2, 130, 200, 67, seed=seed), strict=True
        ):
            tensor.copy_(fresh)
        graph.replay()
        assert oracle.same(results, oracle.run(tensors))


def test_gather_copies_no_operand(monkeypatch):
    """Nor what comes in from behind."""

    def refuse(*_, **__):
        raise AssertionError("a tensor was copied")

    def check_contiguous(tensor):
        assert tensor.is_contiguous(), "a tensor was copied"
        return tensor

    call = Call("bshd", (130,) * 2, (200,) * 2, d=67, heads=(4, 2), mask="causal")
    operands, d_o = call.operands(), call.tensor("q", 4, 67, 7)
    wanted = varlen.run(operands, d_o, torch.zeros(2, 4, 130, device=oracle.DEVICE), mask="causal",
                        deterministic=True)  # fmt: skip
    leaves = [x.requires_grad_() for x in operands]
    for name in ("clone", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch.Tensor, "contiguous", check_contiguous)
    out = attngen.attention(*leaves, mask="causal", backend="cuda", deterministic=True)
    found = torch.autograd.grad(out, leaves, d_o)
    monkeypatch.undo()
    assert torch.equal(out, wanted[0]) and oracle.same(found, wanted[2])


def test_gather_of_what_only_the_copy_engine_reads_is_refused():
    q, k, v = oracle.operands(1, 2, 2, 130, 130, 64)
    eight_bit = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    buffer = torch.zeros(eight_bit[0].numel() + 1, dtype=torch.uint8, device=oracle.DEVICE)
    odd = buffer[1:].view(torch.float8_e4m3fn).view(q.shape)
    with pytest.raises(attngen.SpecError, match="FP8 operands"):
        attngen.attention(odd, *eight_bit[1:], backend="cuda")
    wide = torch.zeros(1, 130, 2, 72, device=oracle.DEVICE).to(torch.float8_e4m3fn)[..., :64]
    with pytest.raises(attngen.SpecError, match="FP8 operands"):
        attngen.attention(wide, *eight_bit[1:], backend="cuda")
