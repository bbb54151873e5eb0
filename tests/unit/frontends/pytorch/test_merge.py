"""Attentions over parts of the keys, merged, are that over all of them."""

from __future__ import annotations

import math

import pytest
import torch

import attngen
from attngen import SpecError
from attngen.reference import attention

LAYOUTS = {"bshd": (2, 7, 4, 8), "sbhd": (7, 2, 4, 8), "bhsd": (2, 4, 7, 8), "thd": (14, 4, 8)}
KEYS = (5, 1, 9)  # of each part


def parts_of(layout, dtype, requires_grad=False):
    """q, and k and v of each part; of packed tokens with their lengths."""
    torch.manual_seed(0)

    def randn(length, heads):
        shape = list(LAYOUTS[layout])
        axis = layout.index("s") if layout != "thd" else 0
        shape[axis] = length * (2 if layout == "thd" else 1)
        shape[layout.index("h")] = heads
        return torch.randn(shape, dtype=dtype, requires_grad=requires_grad)

    def ends(length):
        return torch.tensor([0, length, 2 * length], dtype=torch.int32)

    given = [
        {"cu_seqlens_q": ends(7), "cu_seqlens_kv": ends(n)} if layout == "thd" else {} for n in KEYS
    ]
    return randn(7, 4), [(randn(n, 2), randn(n, 2)) for n in KEYS], given


def joined(pieces, layout):
    """Keys or values of all parts, one after another in each sequence."""
    if layout != "thd":
        return torch.cat(pieces, layout.index("s"))
    halves = [x.chunk(2) for x in pieces]
    return torch.cat([x[n] for n in range(2) for x in halves])


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_parts_are_the_whole(layout, softmax):
    """A sink in one of them is one sink; gradients flow through outputs and LSE."""
    q, parts, given = parts_of(layout, torch.float64, requires_grad=True)
    sink = torch.linspace(-1, 1, 4, requires_grad=True) if softmax == "learnable" else None
    found = []
    for n, ((k, v), lengths) in enumerate(zip(parts, given, strict=True)):
        of_sink = {"softmax": softmax, "sink": sink} if n == 1 and sink is not None else {}
        found.append(attention(q, k, v, layout=layout, **lengths, **of_sink))
    out, lse = attngen.merge_states(
        [x for x, _ in found], [aux.lse for _, aux in found], layout=layout
    )
    k, v = (joined(each, layout) for each in zip(*parts, strict=True))
    lengths = {}
    if layout == "thd":
        total = sum(KEYS)
        ends = torch.tensor([0, total, 2 * total], dtype=torch.int32)
        lengths = {**given[0], "cu_seqlens_kv": ends}
    whole, aux = attention(q, k, v, layout=layout, softmax=softmax, sink=sink, **lengths)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, aux.lse)
    leaves = [q, *(x for pair in parts for x in pair), *([] if sink is None else [sink])]
    gradients = [
        torch.autograd.grad(a.square().sum() + b.sin().sum(), leaves)
        for a, b in ((out, lse), (whole, aux.lse))
    ]
    torch.testing.assert_close(*gradients, check_dtype=False)


def test_rows_that_see_nothing_stay_zero_and_have_no_nan_in_their_gradients():
    lses = [torch.tensor([[[-math.inf, 0.5]]], requires_grad=True) for _ in range(2)]
    lses[1].data[..., 1] = -math.inf  # a row of the first part alone
    outs = [torch.tensor([[[[0.0]], [[3.0]]]], requires_grad=True) for _ in range(2)]
    out, lse = attngen.merge_states(outs, lses)
    assert out.flatten().tolist() == [0, 3] and lse.flatten().tolist() == [-math.inf, 0.5]
    found = torch.autograd.grad(out.sum() + lse[..., 1].sum(), (*outs, *lses))
    assert all(x.isfinite().all() for x in found)


def test_parts_in_float32_are_rounded_once():
    q, parts, _ = parts_of("bshd", torch.bfloat16)
    found = [attention(q, k, v, out_dtype=torch.float32) for k, v in parts]
    outs, lses = [x for x, _ in found], [aux.lse for _, aux in found]
    assert {x.dtype for x in outs} == {torch.float32}
    out, lse = attngen.merge_states(outs, lses, out_dtype=torch.bfloat16)
    k, v = (torch.cat(each, 1).float() for each in zip(*parts, strict=True))
    whole = attention(q.float(), k, v)[0].bfloat16()
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out != whole).float().mean() < 0.02  # sums in another order


@pytest.mark.parametrize(
    ("outs", "lses", "layout", "reason"),
    [
        ([], [], "bshd", "at least one"),
        ([(2, 7, 4, 8)], [], "bshd", "as many outs as lses"),
        ([(2, 7, 4)], [(2, 4, 7)], "bshd", "have 4 axes"),
        ([(2, 7, 4, 8)], [(2, 7, 4)], "bshd", r"lses \[2, 4, 7\]"),
        ([(2, 7, 4, 8), (2, 6, 4, 8)], [(2, 4, 7)] * 2, "bshd", "the shape of the first"),
        ([(7, 4, 8)], [(7, 4)], "thd", r"lses \[4, 7\]"),
        ([(2, 7, 4, 8)], [(2, 4, 7)], "bsdh", "layout"),
    ],
)
def test_parts_that_do_not_fit_are_refused(outs, lses, layout, reason):
    with pytest.raises(SpecError, match=reason):
        attngen.merge_states(
            [torch.zeros(x) for x in outs], [torch.zeros(x) for x in lses], layout=layout
        )


def test_parts_may_be_those_of_stacked_tensors():
    outs, lses = torch.randn(3, 2, 7, 4, 8), torch.randn(3, 2, 4, 7)
    apart = attngen.merge_states([*outs], [*lses])
    assert all(map(torch.equal, attngen.merge_states(outs, lses), apart))
    with pytest.raises(SpecError, match="outs in bshd have 4 axes"):
        attngen.merge_states(outs[0], lses[0])
